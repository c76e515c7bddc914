"""Common options of commands to select a model."""

from typing import Annotated

from dualpath.core.settings import Setting
from dualpath_sim.catalog.families import KvCacheDtype

#: A model: a name in the catalog, a folder with a `config.json`, or a file of either kind.
MODEL_METAVAR = "NAME|FOLDER|FILE"

KvDtype = Annotated[KvCacheDtype, Setting("KV-cache data type of a model given by its config.json")]
