"""How commands are told which model is meant."""

from typing import Annotated

from dualpath.core.settings import Setting
from dualpath.model.catalog.families import KvCacheDtype

#: Where a model's dimensions are wanted: a name of the catalog, a folder with a `config.json`, or a
#: file of either kind.
MODEL_METAVAR = "NAME|FOLDER|FILE"

KvDtype = Annotated[
    KvCacheDtype, Setting("numbers of the KV-cache, of a model given by its config.json")
]
