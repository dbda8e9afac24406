#!/usr/bin/env bash
# Record the runs that docs/pictures.py draws: on a machine with a GPU, from the repository's root.
#   docs/examples/record.sh OUT
set -euo pipefail
out=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
export COLUMNS=96 FORCE_COLOR=1
cd "$(mktemp -d)"
cp "$here/train.py" .
python -m stepscope run --out "$out/h200-gpt" -- python train.py >"$out/train.txt" 2>"$out/run.ansi"
python -m stepscope tune --skip fp16 --budget 4m --out "$out/tune" -- python train.py >"$out/tune.ansi" 2>"$out/tune.err"
