BEGIN TRANSACTION;
CREATE TABLE lockstep_chunks (
	job_id TEXT NOT NULL, 
	stage TEXT NOT NULL, 
	idx BIGINT NOT NULL, 
	seq BIGINT NOT NULL, 
	files BLOB NOT NULL, 
	PRIMARY KEY (job_id, stage, idx, seq)
);
INSERT INTO "lockstep_chunks" VALUES('job-committing','write',0,0,X'789C5D8EC10E82300C86DFA56726E8C5848403CF4188D96691A95B71EB42D4F0EE162E467BFAFFBFFDDA766FB023DA5BCA1E6AB0D14201830B178C537481A1963EDDB30F69955A66AADF3A0A60241EFE0A960222CD82ED2B91938EECD85180BADBF7ABE751A872D61147CA09CB2B1965C97BC72CF7D51C1DA3AAD46127E82323C3775F01C9BDF0649E8C9B5F03D6BCBD682887B32868DBA68165E93F1F9948FB');
INSERT INTO "lockstep_chunks" VALUES('job-committing','write',1,0,X'789C5D8EC10E82300C86DFA56726E0C5848403CF4188D96691A9DBB4EB42D4F0EE162E467BFAFFBFFDDAF66FB013DA6BCA1E1AB064A180D18533D29D5C6068A41F6FD987B44A2D33D56F1D0430128F7F054B011467C1EA4AE45D133B763140D3D7C3EA7912AA9C35E11473C2F2128DB2D17BC72CF7D54C8E51D56ABF13F49191E1BBAF80E45E78344FC6CDAF016BDE5E3431879328E8BAB68565193E1FDC48FC');
INSERT INTO "lockstep_chunks" VALUES('job-completed','write',0,0,X'789C5D8E410F82300C85FF4BCF4CD08B0909077E0721661B45A6B0E2D685A8E1BF5BB8187DA7F75EFB356DDE6007B4F7982628C1060B19F4CE5F31CCC1798652E634A6C9C7CD6AD9297E7516C048DDFF09D60C022D821D0BB1B30EECD89187B239B65BE641A87CD101074A11F31B1965699A4764ECD4121CA32AD4E920E42321C3F75C06D1BDF0629E8C7BDE0AD6BC7F6828F94E1CD47555C1BAB61FC9A2487D');
INSERT INTO "lockstep_chunks" VALUES('job-completed','write',1,0,X'789C5D8E410F82300C85FF4BCF4CC08B0909077E0731661B45A6B0E2D685A8E1BF5BB8187DA7F75EFB356DDF6007B4F79826A8C0060B19F4CE5F31CCC179864AE634A6C9C7CD6AD9297E7512C048DDFF09D60C022D829585D8590776ECC843D596E72DF32054BEE88003A588F98D8CB234CD2332766A098E5195EA7810F29190E17B2E83E85E78314FC63D6F056BDE3F34947C270E9AA6AE615DCF1FC9E5487E');
INSERT INTO "lockstep_chunks" VALUES('half','write',0,0,X'789CCD4F410E823010FCCB9EABC089848403EF20C494BAB58DD062BB0D51C3DFDD72317AF5E29C666667929DFE09CAA0BAC63443032A2810A0ADBB60588275040DDFFD94661733959C293F517361645B7F013601C1AF5CAB4AA68B0C64C97A074D5F0D5993E156B1CA80C6A7888591933E94470EDE1212BCDB02A27DE069BC13EE3A1B24697F68F4C99D9941D7B52D6C9BF8AF39D58F73861700F483EC');
INSERT INTO "lockstep_chunks" VALUES('import','map',0,0,X'789C5D8ECD0E82400C84DFA56710F06242C281E720C4ECAE4536BA3F76BB216A78770B17A3739A99F66B3ABCC1CC686E293B68C190810226EBAF4891AC6768651EEED9F9B459253BF5AF4E0268A9A73FC15A008545B0A6161B15B1651B3CB443336E9967A1AA4511CE2127ACAC8B81B8742A9675793C08F0C8C8F0BD5240B22F3CEB27E39EB78215EF8FE990FD451CF47DD7C1BA8E1F218C4506');
CREATE TABLE lockstep_history (
	id INTEGER NOT NULL, 
	job_id TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	event TEXT NOT NULL, 
	state TEXT NOT NULL, 
	generation BIGINT NOT NULL, 
	detail TEXT NOT NULL, 
	worker TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "lockstep_history" VALUES(1,'job-pending',1700000000.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(2,'job-running',1700000001.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(3,'job-running',1700000001.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(4,'job-paused',1700000002.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(5,'job-paused',1700000002.0,'pause','paused',1,'',NULL);
INSERT INTO "lockstep_history" VALUES(6,'job-committing',1700000003.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(7,'job-committing',1700000003.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(8,'job-committing',1700000003.0,'all_tasks_done','committing',1,'','w1');
INSERT INTO "lockstep_history" VALUES(9,'job-completed',1700000004.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(10,'job-completed',1700000004.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(11,'job-completed',1700000004.0,'all_tasks_done','committing',1,'','w1');
INSERT INTO "lockstep_history" VALUES(12,'job-completed',1700000004.0,'claim_commit','committing',1,'','w1');
INSERT INTO "lockstep_history" VALUES(13,'job-completed',1700000004.0,'committed','completed',1,'snapshot 42','w1');
INSERT INTO "lockstep_history" VALUES(14,'job-failed',1700000005.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(15,'job-failed',1700000005.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(16,'job-failed',1700000005.0,'fail','failed',1,'',NULL);
INSERT INTO "lockstep_history" VALUES(17,'job-killed',1700000006.0,'create','pending',1,'2 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(18,'job-killed',1700000006.0,'kill','killed',1,'',NULL);
INSERT INTO "lockstep_history" VALUES(19,'half',1700000007.0,'create','pending',1,'3 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(20,'half',1700000007.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(21,'half',1700000007.0,'task_failed','running',1,'task 1 of write, attempt 1: Retryable: storage is away; again in 20.0 s','w2');
INSERT INTO "lockstep_history" VALUES(22,'import',1700000007.0,'create','pending',1,'1 tasks',NULL);
INSERT INTO "lockstep_history" VALUES(23,'import',1700000007.0,'start','running',1,'','w1');
INSERT INTO "lockstep_history" VALUES(24,'import',1700000007.0,'advance','running',1,'map → merge, 1 tasks',NULL);
CREATE TABLE lockstep_jobs (
	job_id TEXT NOT NULL, 
	request_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	state TEXT NOT NULL, 
	generation BIGINT NOT NULL, 
	commit_id TEXT NOT NULL, 
	plan_format INTEGER NOT NULL, 
	scope TEXT NOT NULL, 
	holds BOOLEAN NOT NULL, 
	stage TEXT NOT NULL, 
	last_stage TEXT NOT NULL, 
	tasks_total BIGINT NOT NULL, 
	tasks_done BIGINT NOT NULL, 
	rows_done BIGINT NOT NULL, 
	bytes_done BIGINT NOT NULL, 
	files BIGINT NOT NULL, 
	attempts BIGINT NOT NULL, 
	fingerprint TEXT, 
	created_at DOUBLE NOT NULL, 
	updated_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	snapshot_id BIGINT, 
	kill_requested BOOLEAN NOT NULL, 
	released BOOLEAN NOT NULL, 
	commit_epoch BIGINT NOT NULL, 
	commit_owner TEXT, 
	commit_free_at DOUBLE NOT NULL, 
	commit_started_at DOUBLE, 
	commit_attempts BIGINT NOT NULL, 
	error TEXT, paced_at DOUBLE, paced_rows BIGINT DEFAULT 0 NOT NULL, 
	PRIMARY KEY (job_id)
);
INSERT INTO "lockstep_jobs" VALUES('job-pending','request-job-pending','export','pending',1,'936c35fe-ca1e-58bb-a2c6-1ec9096fa763',1,'scope-job-pending',1,'write','write',2,0,0,0,0,0,NULL,1700000000.0,1700000000.0,NULL,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,NULL,0);
INSERT INTO "lockstep_jobs" VALUES('job-running','request-job-running','export','running',1,'f65ae350-549f-5b65-95d5-54022cf95a4f',1,'scope-job-running',1,'write','write',2,0,0,0,0,1,NULL,1700000001.0,1700000001.0,1700000001.0,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,1700000001.0,0);
INSERT INTO "lockstep_jobs" VALUES('job-paused','request-job-paused','export','paused',1,'00702571-f104-57e3-a02a-15107bc0a8f6',1,'scope-job-paused',1,'write','write',2,0,0,0,0,0,NULL,1700000002.0,1700000002.0,NULL,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,NULL,0);
INSERT INTO "lockstep_jobs" VALUES('job-committing','request-job-committing','export','committing',1,'2b0e9280-325c-5185-a807-d58d1c75aa31',1,'scope-job-committing',1,'write','write',2,2,20,200,2,2,'{"columns":{"a":"000000000000000e","b":"fffffffffffffffe"},"rows":20}',1700000003.0,1700000003.0,1700000003.0,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,1700000003.0,0);
INSERT INTO "lockstep_jobs" VALUES('job-completed','request-job-completed','export','completed',1,'2c6cc110-227f-5955-84a5-544dfb544835',1,'scope-job-completed',1,'write','write',2,2,20,200,2,2,'{"columns":{"a":"000000000000000e","b":"fffffffffffffffe"},"rows":20}',1700000004.0,1700000007.0,1700000004.0,1700000004.0,42,0,1,1,NULL,1700000034.0,1700000004.0,0,NULL,1700000004.0,0);
INSERT INTO "lockstep_jobs" VALUES('job-failed','request-job-failed','export','failed',1,'7bd7a481-b420-5514-8e7a-21f064deec6e',1,'scope-job-failed',0,'write','write',2,0,0,0,0,1,NULL,1700000005.0,1700000005.0,1700000005.0,1700000005.0,NULL,0,0,0,NULL,0.0,NULL,0,NULL,1700000005.0,0);
INSERT INTO "lockstep_jobs" VALUES('job-killed','request-job-killed','export','killed',1,'489b3b53-a735-5b69-826e-ae0baa1a3fb8',1,'scope-job-killed',0,'write','write',2,0,0,0,0,0,NULL,1700000006.0,1700000006.0,NULL,1700000006.0,NULL,0,0,0,NULL,0.0,NULL,0,NULL,NULL,0);
INSERT INTO "lockstep_jobs" VALUES('half','request-half','export','running',1,'b0a2a3b8-08ec-53b7-9c00-df0b7e9a726b',1,'scope-half',1,'write','write',3,0,5,10,2,2,'{"columns":{"a":"000000000000000e","b":"fffffffffffffffe"},"rows":20}',1700000007.0,1700000007.0,1700000007.0,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,1700000007.0,0);
INSERT INTO "lockstep_jobs" VALUES('import','request-import','export','running',1,'7a7cd50f-d3bc-5772-9a15-5f30c6f90292',1,'scope-import',1,'merge','merge',1,0,0,0,0,1,NULL,1700000007.0,1700000007.0,1700000007.0,NULL,NULL,0,0,0,NULL,0.0,NULL,0,NULL,1700000007.0,0);
CREATE TABLE lockstep_plans (
	job_id TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	holding TEXT NOT NULL, 
	beside TEXT NOT NULL, 
	PRIMARY KEY (job_id)
);
INSERT INTO "lockstep_plans" VALUES('job-pending','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-pending","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-running','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-running","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-paused','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-paused","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-committing','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-committing","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-completed','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-completed","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-failed','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-failed","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('job-killed','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-job-killed","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('half','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["write"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[{"first":1,"last":3,"name":"all_1_3_1"}],"scope":"scope-half","whole":true}','[]');
INSERT INTO "lockstep_plans" VALUES('import','{"columns":[],"deadline_s":null,"file_size_bytes":256000000,"format_version":1,"kind":"export","limits":{"commit_attempts":20,"commit_deadline_s":600.0,"lease_s":30.0,"task_attempts":8,"task_deadline_s":3600.0,"task_memory_bytes":512000000},"location":"/warehouse/db/events","on_existing":"error","partition":"202401","partition_values":[],"pin":{"parts":["all_1_1_0"]},"properties":{},"replaces":[],"rows":null,"schema":{"fields":[],"type":"struct"},"sort_order":{"fields":[],"order-id":0},"source":"clickhouse://reader:${PASSWORD}@host:8123/db/events","spec":{"fields":[],"spec-id":0},"stages":["map","merge"],"target":"iceberg://lake/db.events","target_uuid":"3f8a"}','{"pieces":[],"scope":"scope-import","whole":true}','[]');
CREATE TABLE lockstep_scopes (
	scope TEXT NOT NULL, 
	PRIMARY KEY (scope)
);
INSERT INTO "lockstep_scopes" VALUES('scope-job-pending');
INSERT INTO "lockstep_scopes" VALUES('scope-job-running');
INSERT INTO "lockstep_scopes" VALUES('scope-job-paused');
INSERT INTO "lockstep_scopes" VALUES('scope-job-committing');
INSERT INTO "lockstep_scopes" VALUES('scope-job-completed');
INSERT INTO "lockstep_scopes" VALUES('scope-job-failed');
INSERT INTO "lockstep_scopes" VALUES('scope-job-killed');
INSERT INTO "lockstep_scopes" VALUES('scope-half');
INSERT INTO "lockstep_scopes" VALUES('scope-import');
CREATE TABLE lockstep_tasks (
	job_id TEXT NOT NULL, 
	stage TEXT NOT NULL, 
	idx BIGINT NOT NULL, 
	descriptor TEXT NOT NULL, 
	rows BIGINT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	attempts BIGINT NOT NULL, 
	free_at DOUBLE, 
	owner TEXT, 
	started_at DOUBLE, 
	position TEXT, 
	rows_done BIGINT NOT NULL, 
	bytes_done BIGINT NOT NULL, 
	saved_rows BIGINT NOT NULL, 
	saved_bytes BIGINT NOT NULL, 
	saved_epoch BIGINT NOT NULL, 
	saved_digest TEXT, 
	files BIGINT NOT NULL, 
	chunks BIGINT NOT NULL, 
	error TEXT, 
	PRIMARY KEY (job_id, stage, idx)
);
INSERT INTO "lockstep_tasks" VALUES('job-pending','write',0,'{"part":0}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-pending','write',1,'{"part":1}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-running','write',0,'{"part":0}',10,100,'leased',2,1,1700000031.0,'w1',1700000001.0,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-running','write',1,'{"part":1}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-paused','write',0,'{"part":0}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-paused','write',1,'{"part":1}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-committing','write',0,'{"part":0}',10,100,'done',2,1,NULL,NULL,1700000003.0,'{"row":10}',10,100,10,100,2,'95a4bfa388b40aeb21e56ac7e26787377a97383130de53d8bbcf7e40d6fa8cd5',1,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-committing','write',1,'{"part":1}',10,100,'done',2,1,NULL,NULL,1700000003.0,'{"row":10}',10,100,10,100,2,'37e9aec0430600cb8f5a6a0433e733e37217e1963700bda0893731dec3a43293',1,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-completed','write',0,'{"part":0}',10,100,'done',2,1,NULL,NULL,1700000004.0,'{"row":10}',10,100,10,100,2,'4fac131fcea804c625ebfd7f27febce0944f13a3fb230865ba3a5bbbd474b723',1,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-completed','write',1,'{"part":1}',10,100,'done',2,1,NULL,NULL,1700000004.0,'{"row":10}',10,100,10,100,2,'50fb9209905a1546c3c75e07fbb95c8dec872a81275c3aad05263514fd96b191',1,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-failed','write',0,'{"part":0}',10,100,'waiting',2,1,0.0,NULL,1700000005.0,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-failed','write',1,'{"part":1}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-killed','write',0,'{"part":0}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('job-killed','write',1,'{"part":1}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('half','write',0,'{"part":0}',10,100,'leased',2,1,1700000037.0,'w1',1700000007.0,'{"row":5}',5,10,5,10,2,'dd854db9b44c2aba816d44ced8cdc0453dc5f79f91b5be28fa2ccda097db7f8f',2,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('half','write',1,'{"part":1}',10,100,'waiting',2,1,1700000027.0,NULL,1700000007.0,NULL,0,0,0,0,0,NULL,0,0,'{"class":"Retryable","hint":"wait","message":"storage is away","task":null}');
INSERT INTO "lockstep_tasks" VALUES('half','write',2,'{"part":2}',10,100,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
INSERT INTO "lockstep_tasks" VALUES('import','map',0,'{"part":0}',10,100,'done',2,1,NULL,NULL,1700000007.0,'{"row":10}',10,100,10,100,2,'bf87df55df00878addbb082b488951029177ea1740f98eb5f6c4d8e792e7cf25',1,1,NULL);
INSERT INTO "lockstep_tasks" VALUES('import','merge',0,'{"range":0}',5,0,'waiting',0,0,0.0,NULL,NULL,NULL,0,0,0,0,0,NULL,0,0,NULL);
CREATE TABLE lockstep_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT lockstep_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "lockstep_version" VALUES('0003');
CREATE INDEX lockstep_jobs_by_age ON lockstep_jobs (created_at, job_id);
CREATE INDEX lockstep_jobs_committing ON lockstep_jobs (commit_free_at) WHERE state = 'committing';
CREATE INDEX lockstep_jobs_runnable ON lockstep_jobs (created_at, job_id) WHERE state IN ('pending', 'running');
CREATE INDEX lockstep_jobs_by_scope ON lockstep_jobs (scope, holds);
CREATE INDEX lockstep_jobs_by_commit ON lockstep_jobs (commit_id);
CREATE INDEX lockstep_tasks_leased ON lockstep_tasks (job_id, free_at, owner) WHERE state = 'leased';
CREATE INDEX lockstep_tasks_retrying ON lockstep_tasks (job_id) WHERE state = 'waiting' AND free_at > 0;
CREATE INDEX lockstep_history_by_job ON lockstep_history (job_id, id);
CREATE INDEX lockstep_tasks_open ON lockstep_tasks (job_id, stage, free_at, idx) WHERE free_at IS NOT NULL;
COMMIT;
