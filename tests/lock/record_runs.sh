#!/usr/bin/env bash
# Record the runs of the lock again, where a change of what `run` writes asks for it. Every answer
# about them changes with it.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tests=$(dirname "$here")
rm -rf "$here/runs" && mkdir -p "$here/runs"
run() {  # run NAME [OPTION...] -- COMMAND...
  local name=$1
  shift
  timeout 170 stepscope run --no-explain --out "$here/runs/$name" "$@" >/dev/null 2>&1
  echo "$name: $(du -sk "$here/runs/$name" | cut -f1) KiB"
}
cd "$tests/measure/scripts"
for script in accumulation closure evaluates gan grad_scaler lbfgs no_optimizer plain raises workers; do
  run "$script" -- python "$script.py"
done
run ddp -- torchrun --nproc-per-node=2 ddp.py
run fsdp2 -- torchrun --nproc-per-node=2 fsdp2.py
run with-remedies --with fused-optimizer,gc-freeze -- python plain.py
run two-steps --active 1 -- python plain.py
run no-memory --no-memory -- python plain.py
cd "$tests/whole_run/scripts"
for script in checkpoints collects_garbage doubles every_step_stalls healthy keeps_tensors lengths_vary one_step recompiles \
  restarts slow_loader; do
  run "whole-$script" -- python "$script.py"
done
cd "$tests/../docs/learn/scripts"
run lesson-two -- torchrun --nproc-per-node=2 two.py
run lesson-feed -- python feed.py
rm -rf "$here"/runs/*/report.html
python3 - "$here/runs" "$(cd "$tests/.." && pwd)" <<'END'
import gzip, pathlib, sys

for file in pathlib.Path(sys.argv[1]).rglob("*"):
    if file.is_file():  # answers must not depend on the folder in which the runs were recorded
        zipped = file.suffix == ".gz"
        content = gzip.decompress(file.read_bytes()) if zipped else file.read_bytes()
        content = content.replace(sys.argv[2].encode(), b"/home/user/stepscope")
        file.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
END
