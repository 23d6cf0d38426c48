#!/bin/bash
# The three commands from an empty directory to a retrofitted model with its page, timed on one GPU.
#
#   QWEN=model.gguf QUESTIONS=train.jsonl bash three_commands.sh DIR
#
# DIR/three.json has the seconds, DIR/run is the run directory; the same command goes on after a
# stop. WHEEL is the library's wheel: without one the library is what PYTHONPATH has. FLAGS are the
# options of the third command, PYTHON the interpreter.
set -u
DIR=$1
PYTHON=${PYTHON:-python3}
PLANNED="--style boxed --dtype bfloat16 --ratios 2 3.3 --temperatures 0.7 1.0 0.0"
PLANNED+=" --questions 6345 --held-out 128 --lanes 1320 --evaluate-every 305 --checkpoint-every 100"
FLAGS=${FLAGS:-$PLANNED}
WHEEL=${WHEEL:-}
mkdir -p "$DIR" && cd "$DIR" || exit 1
export JAX_COMPILATION_CACHE_DIR=$PWD/compiled # nothing is compiled before
begin=$(date +%s.%N)
installed="on the path already"
pip="$PYTHON -m pip install -q --no-index --no-deps --upgrade --target site"
if [ -n "$WHEEL" ] && $pip "$WHEEL"; then # its dependencies are there
  installed="installed from its wheel, beside its dependencies"
  export PYTHONPATH=$PWD/site:${PYTHONPATH:-}
fi
first=$(date +%s.%N)
cp "$QUESTIONS" questions.jsonl
second=$(date +%s.%N)
third="retrofit self-taught --prompts questions.jsonl --out run $FLAGS"
# shellcheck disable=SC2086
$PYTHON -c 'import sys; from dms_jax.command_line import main; sys.exit(main())' \
  $third --model "$QWEN"
status=$?
end=$(date +%s.%N)
$PYTHON - "$begin" "$first" "$second" "$end" "$status" "$installed" "$third" <<'P'
import datetime
import json
import pathlib
import subprocess
import sys

begin, first, second, end = map(float, sys.argv[1:5])
file, stages = pathlib.Path("three.json"), pathlib.Path("run/seconds.json")
calls = json.loads(file.read_text())["calls"] if file.exists() else []
parts = {"install": first - begin, "questions": second - first, "retrofit": end - second}
calls.append({**parts, "exit": int(sys.argv[5])})
try:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
except OSError:
    listed = ""
record = {
    "command": f"dms-jax {sys.argv[7]} --model model.gguf",
    "installed": sys.argv[6],
    "seconds": sum(call[part] for call in calls for part in parts),
    "calls": calls,
    "stages": json.loads(stages.read_text()) if stages.exists() else None,
    "device": listed.split("(")[0].partition(":")[2].strip() or "cpu",
    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
}
file.write_text(json.dumps(record) + "\n")
print(json.dumps(record))
P
exit $status
