"""Exactly-once bulk export and import for Apache Iceberg."""
