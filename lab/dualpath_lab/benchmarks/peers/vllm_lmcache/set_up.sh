#!/bin/sh
# Creates an environment with this stack in the given directory.
# Usage: sh set_up.sh DIRECTORY [PYTHON]
set -eu
if [ $# -lt 1 ]; then
    echo "usage: sh set_up.sh DIRECTORY [PYTHON]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
sh "$here/../environment.sh" "$1" "$here" "${2:-python3}"
"$1/bin/python" -c "import nixl._api, lmcache.v1.multiprocess.custom_types"
echo "$1 is ready"
