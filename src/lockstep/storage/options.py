"""Which options reach a storage: those of [storage], and those of the catalog of the table."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from lockstep.storage.objects import S3_SCHEMES

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.job import Plan

# What PyIceberg calls the options of an object store, and what obstore calls them.
_OF_CATALOG: Final = {
    "s3.endpoint": "endpoint",
    "s3.region": "region",
    "client.region": "region",
    "s3.access-key-id": "access_key_id",
    "client.access-key-id": "access_key_id",
    "s3.secret-access-key": "secret_access_key",
    "client.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
    "client.session-token": "session_token",
    "s3.proxy-uri": "proxy_url",
    "s3.anonymous": "skip_signature",
    "s3.force-virtual-addressing": "virtual_hosted_style_request",
    "s3.connect-timeout": "connect_timeout",
    "s3.request-timeout": "timeout",
}


def with_catalog(
    options: Mapping[str, Mapping[str, str]], catalog: Mapping[str, Any], location: str = ""
) -> Mapping[str, Mapping[str, str]]:
    """The options for `Storage`, where a catalog's own `s3.*` properties serve what `options` does not name.

    So a lake that PyIceberg can use needs no [storage] of its own. With a `location` they serve only its
    bucket.
    """
    found: dict[str, str] = {}
    for theirs, ours in _OF_CATALOG.items():
        if (value := catalog.get(theirs)) is not None and ours not in found:
            found[ours] = f"{value}s" if ours.endswith("timeout") else str(value)
    scheme, marker, path = location.partition("://")
    prefixes = [scheme + marker + path.partition("/")[0]] if location else [f"{s}://" for s in S3_SCHEMES]
    # The given ones are looked up late: one that has a wrong value raises only where it is used.
    return ChainMap(cast(Any, options), {prefix: found for prefix in prefixes if found})


def options_of(plan: Plan, config: Config) -> Mapping[str, Mapping[str, str]]:
    """The options for `Storage` that reach the table of a plan as well as everything else."""
    return with_catalog(config.storage, catalog_of(plan.target, config), plan.location)


def catalog_of(target: str, config: Config) -> Mapping[str, Any]:
    """The properties of the catalog that a target's address names; none if it is not configured here."""
    from lockstep.secrets import expand

    name = expand(target, config).removeprefix("iceberg://").partition("/")[0]
    return config.catalogs.get(name, {})
