#!/bin/sh
# Creates an environment with Dynamo's simulator in the given directory (about 450 MB, a minute).
# Usage: sh set_up.sh DIRECTORY [PYTHON]
set -eu
if [ $# -lt 1 ]; then
    echo "usage: sh set_up.sh DIRECTORY [PYTHON]" >&2
    exit 2
fi
directory=$1
python=${2:-python3}
here=$(dirname "$0")
"$python" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --requirement "$here/requirements.txt"
"$directory/bin/python" -c "from dynamo.replay import run_trace_replay"
echo "$directory is ready"
