"""Settings of a storage that is kept within limits; the same for engines and for a lone janitor."""

from typing import Annotated

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.policy.quotas import StorageLimits

StorageQuota = Annotated[
    int,
    Setting(
        "most that may lie in the storage, all namespaces together, such as 2TiB; 0 for no limit",
        ge=0,
    ),
]
NamespaceQuota = Annotated[
    int, Setting("most of one namespace (a model at one setting); 0 for no limit", ge=0)
]
TenantQuota = Annotated[
    int,
    Setting(
        "most of one tenant, that is of requests with one cache_salt, and of those with none; 0 "
        "for no limit",
        ge=0,
    ),
]
StorageTtl = Annotated[
    float, Setting("a prefix that nobody asked for that long is removed; 0 for no limit", ge=0)
]


class StorageLimitSettings(Settings, frozen=True, kw_only=True):
    """How much may lie in a storage, what is removed first, and what is written at all."""

    storage_quota: StorageQuota = 0
    storage_namespace_quota: NamespaceQuota = 0
    storage_tenant_quota: TenantQuota = 0
    storage_ttl: StorageTtl = 0.0
    storage_high: Annotated[
        float, Setting("share of a quota above which blocks are removed", gt=0, le=1)
    ] = 0.95
    storage_low: Annotated[
        float, Setting("share of a quota down to which they are removed", gt=0, le=1)
    ] = 0.85
    storage_protect_s: Annotated[
        float,
        Setting(
            "what was used that short a time ago is never removed; engines believe in a block "
            "they have seen for up to 120 s",
            ge=0,
        ),
    ] = 150.0

    def check(self) -> None:
        """Raise ``ConfigError`` for watermarks the wrong way round."""
        super().check()
        if self.storage_low > self.storage_high:
            raise ConfigError(
                f"{{storage_low}} is {self.storage_low:g}, above {{storage_high}} of "
                f"{self.storage_high:g}; set it below"
            )

    @property
    def limits(self) -> StorageLimits:
        """The limits, as the janitor takes them."""
        return StorageLimits(
            quota_bytes=self.storage_quota,
            namespace_quota_bytes=self.storage_namespace_quota,
            tenant_quota_bytes=self.storage_tenant_quota,
            ttl_s=self.storage_ttl,
            high=self.storage_high,
            low=self.storage_low,
            protect_s=self.storage_protect_s,
        )
