"""Settings of the limits of a storage, used by engines and by a stand-alone janitor."""

from typing import Annotated

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.policy.quotas import StorageLimits

StorageQuota = Annotated[
    int,
    Setting(
        "maximum size of the storage, all namespaces together, such as 2TiB; 0 for no limit",
        ge=0,
    ),
]
NamespaceQuota = Annotated[
    int, Setting("maximum size of one namespace (a model at one setting); 0 for no limit", ge=0)
]
TenantQuota = Annotated[
    int,
    Setting(
        "maximum size of one tenant, that is of requests with one cache_salt, or with none; 0 for "
        "no limit",
        ge=0,
    ),
]
StorageTtl = Annotated[
    float, Setting("remove a prefix that was not used for this time; 0 for no limit", ge=0)
]


class StorageLimitSettings(Settings, frozen=True, kw_only=True):
    """Limits of the size of a storage, and of the eviction of its blocks."""

    storage_quota: StorageQuota = 0
    storage_namespace_quota: NamespaceQuota = 0
    storage_tenant_quota: TenantQuota = 0
    storage_ttl: StorageTtl = 0.0
    storage_high: Annotated[
        float, Setting("share of a quota above which blocks are evicted", gt=0, le=1)
    ] = 0.95
    storage_low: Annotated[
        float, Setting("share of a quota down to which blocks are evicted", gt=0, le=1)
    ] = 0.85
    storage_protect_s: Annotated[
        float,
        Setting(
            "never evict blocks used within this time; engines rely on a block that they have "
            "seen for up to 120 s",
            ge=0,
        ),
    ] = 150.0

    def check(self) -> None:
        """Raise ``ConfigError`` if the low watermark is above the high one."""
        super().check()
        if self.storage_low > self.storage_high:
            raise ConfigError(
                f"{{storage_low}} is {self.storage_low:g}, above {{storage_high}} of "
                f"{self.storage_high:g}; set it below"
            )

    @property
    def limits(self) -> StorageLimits:
        """The limits in the form of the janitor."""
        return StorageLimits(
            quota_bytes=self.storage_quota,
            namespace_quota_bytes=self.storage_namespace_quota,
            tenant_quota_bytes=self.storage_tenant_quota,
            ttl_s=self.storage_ttl,
            high=self.storage_high,
            low=self.storage_low,
            protect_s=self.storage_protect_s,
        )
