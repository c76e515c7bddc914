#!/bin/sh
# Creates an environment for one peer: the same vLLM CPU build as DualPath's, and the peer.
# Usage: sh environment.sh DIRECTORY STACK_FOLDER [PYTHON]
#
# The folder contains requirements.txt and, where the peer's pins conflict with vLLM's,
# overrides.txt. uv is needed because pip cannot override a requirement; uv does not read pip's
# settings, so they are passed to it.
set -eu
directory=$1
stack=$2
python=${3:-python3}
repository=$(cd "$(dirname "$0")/../.." && pwd)

"$python" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check uv

pip_setting() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$directory/bin/python" -m pip config list 2>/dev/null \
        | sed -n "s/^[a-z:]*\.$1='\(.*\)'\$/\1/p" | head -n 1
}
links=$(pip_setting find-links)
index=$(pip_setting index-url)
certificate=$(pip_setting cert)
if [ -n "$links" ]; then
    export UV_FIND_LINKS="$links"
else
    export UV_TORCH_BACKEND=cpu
fi
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
if [ -n "$certificate" ]; then export SSL_CERT_FILE="$certificate"; fi

set -- --override "$repository/constraints/overrides.txt"
if [ -f "$stack/overrides.txt" ]; then set -- "$@" --override "$stack/overrides.txt"; fi
VIRTUAL_ENV="$directory" "$directory/bin/uv" pip install --quiet "$@" \
    --constraint "$repository/constraints/runtime.txt" \
    --build-constraints "$repository/constraints/runtime.txt" \
    --requirement "$stack/requirements.txt"
