"""MinIO, the Iceberg REST catalog and Toxiproxy for tests: private to one run, and gone when it is."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from obstore.store import S3Store

from tests.lab import die_with_parent
from tests.readers import cache_folder
from tests.servers import Missing, Server, free_port

ROOT: Final = Path(__file__).parents[1]
ACCESS_KEY: Final = "lockstep"
SECRET_KEY: Final = "lockstep-s3cret"
REGION: Final = "us-east-1"


class HttpServer(Server):
    before_exec = staticmethod(die_with_parent)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


class Minio(HttpServer):
    """Object storage that keeps its buckets over a kill and a start."""

    def options(self, url: str | None = None) -> dict[str, str]:
        """The options of `[storage."s3://…"]`, for the server itself or for a proxy before it."""
        return {
            "endpoint": url or self.url,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": REGION,
            "allow_http": "true",
        }

    def make_bucket(self, name: str) -> None:
        # A folder in the data folder is a bucket: no client is needed to make one.
        (self.folder / "data" / name).mkdir(parents=True)

    def client(self, bucket: str) -> S3Store:
        options: Any = self.options()
        return S3Store(bucket, config=options)

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """What a listing shows, straight from the server."""
        pages = self.client(bucket).list(prefix or None)
        return sorted(found["path"] for page in pages for found in page)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        program = go_server("minio")
        arguments = ["server", "data", "--address", f"127.0.0.1:{self.port}", "--console-address"]
        return [str(program), *arguments, f"127.0.0.1:{free_port()}"], {
            "MINIO_ROOT_USER": ACCESS_KEY,
            "MINIO_ROOT_PASSWORD": SECRET_KEY,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            # Beside other tests the machine is slow: a request is to be answered late rather than refused.
            "MINIO_API_REQUESTS_DEADLINE": "60s",
        }

    def _answers(self) -> bool:
        return _get(f"{self.url}/minio/health/ready")


class RestCatalog(HttpServer):
    """The Iceberg REST reference server; its tables lie in a bucket of a MinIO."""

    def __init__(self, folder: Path, minio: Minio, warehouse: str, storage_url: str | None = None) -> None:
        super().__init__(folder)
        self._minio = minio
        self.warehouse = warehouse
        self._storage_url = storage_url or minio.url

    def properties(self, url: str | None = None, storage_url: str | None = None) -> dict[str, str]:
        """The properties of `[catalogs.NAME]`, for the server itself or for a proxy before it."""
        return {
            "type": "rest",
            "uri": url or self.url,
            **s3_properties(storage_url or self._storage_url),
        }

    def _command(self) -> tuple[list[str], dict[str, str]]:
        jars = cache_folder() / "rest-catalog"
        if not jars.is_dir():
            raise Missing(f"the Iceberg REST server is not under {jars}: run `make setup`")
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        environment = {
            "CATALOG_REST_PORT": str(self.port),
            "CATALOG_URI": f"jdbc:sqlite:{self.folder / 'catalog.db'}",
            "CATALOG_WAREHOUSE": self.warehouse,
            "CATALOG_IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO",
            "CATALOG_S3_ENDPOINT": self._storage_url,
            "CATALOG_S3_PATH__STYLE__ACCESS": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }
        main = "org.apache.iceberg.rest.RESTCatalogServer"
        return ["java", *options, "-cp", f"{jars}/*", main], environment

    def _answers(self) -> bool:
        return _get(f"{self.url}/v1/config")


def spark_properties(catalog: Mapping[str, str]) -> dict[str, str]:
    """A catalog of ours as Spark's own Iceberg runtime names it."""
    properties = {
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        "s3.endpoint": catalog["s3.endpoint"],
        "s3.access-key-id": ACCESS_KEY,
        "s3.secret-access-key": SECRET_KEY,
        "s3.path-style-access": "true",
        "client.region": REGION,
    }
    if catalog["type"] == "rest":
        return {"type": "rest", "uri": catalog["uri"], **properties}
    return {
        "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "uri": f"jdbc:{catalog['uri'].replace(':///', ':')}",
        "jdbc.schema-version": "V1",
        "warehouse": catalog["warehouse"],
        **properties,
    }


def s3_properties(url: str) -> dict[str, str]:
    """PyIceberg's properties for object storage."""
    return {
        "s3.endpoint": url,
        "s3.access-key-id": ACCESS_KEY,
        "s3.secret-access-key": SECRET_KEY,
        "s3.region": REGION,
    }


class Toxiproxy(HttpServer):
    """Proxies before other servers, and toxics in them."""

    def proxy(self, name: str, upstream_port: int) -> Proxy:
        return Proxy(self, name, upstream_port)

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=verb,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _command(self) -> tuple[list[str], dict[str, str]]:
        return [str(go_server("toxiproxy")), "-host", "127.0.0.1", "-port", str(self.port)], {}

    def _answers(self) -> bool:
        return _get(f"{self.url}/version")


class Proxy:
    """One way through Toxiproxy, clean until a toxic is put into it."""

    def __init__(self, server: Toxiproxy, name: str, upstream_port: int) -> None:
        self._server = server
        self._path = f"/proxies/{name}"
        self.port = free_port()
        body = {
            "name": name,
            "listen": f"127.0.0.1:{self.port}",
            "upstream": f"127.0.0.1:{upstream_port}",
            "enabled": True,
        }
        server.ask("POST", "/proxies", body)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break all connections, and refuse new ones until `mend`."""
        self._server.ask("POST", self._path, {"enabled": False})

    def mend(self) -> None:
        self._server.ask("POST", self._path, {"enabled": True})

    def add(self, kind: str, stream: str = "downstream", toxicity: float = 1.0, **attributes: Any) -> None:
        """`kind`: latency, bandwidth, slow_close, timeout, reset_peer, slicer or limit_data.

        `stream`: downstream is what the server says, upstream what the client says.
        """
        body = {"type": kind, "stream": stream, "toxicity": toxicity, "attributes": attributes}
        self._server.ask("POST", f"{self._path}/toxics", body)

    def clean(self) -> None:
        """Take all toxics away, and let everybody in again."""
        for toxic in self._server.ask("GET", f"{self._path}/toxics"):
            self._server.ask("DELETE", f"{self._path}/toxics/{toxic['name']}")
        self.mend()

    @contextmanager
    def with_toxic(self, kind: str, stream: str = "downstream", **attributes: Any) -> Iterator[None]:
        self.add(kind, stream, **attributes)
        try:
            yield
        finally:
            self.clean()


def go_server(name: str) -> Path:
    """What `make setup` has built. Raises: Missing."""
    for entry in (ROOT / "scripts" / "go-servers.txt").read_text().splitlines():
        if entry.startswith(f"{name} "):
            path = cache_folder() / "servers" / f"{name}-{entry.split()[2]}"
            if path.exists():
                return path
            raise Missing(f"{name} is not at {path}: run `make setup`, which builds it with Go")
    raise AssertionError(f"scripts/go-servers.txt does not name {name}")
