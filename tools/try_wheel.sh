#!/bin/sh
# Tries the wheel as somebody does who installs it: an empty environment, and a folder that is not the checkout.
# usage: tools/try_wheel.sh [all]     all: with every extra, and each command (`make check`); else train for ten seconds (`make wheel`)
set -eu

checkout=$(cd "$(dirname "$0")/.." && pwd)
python="$checkout/.venv/bin/python"
extra=${1:+[$1]}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$folder" "$checkout"
wheel=$(ls "$folder"/*.whl)
echo "Installing $(basename "$wheel")$extra into an empty environment"
"$python" -m venv "$folder/env"
bin="$folder/env/bin"
"$bin/python" -m pip install -q --disable-pip-version-check --constraint "$checkout/constraints.txt" "phasicrl$extra @ file://$wheel"

cd "$folder"
"$bin/python" - "$folder" <<'PYTHON'
import sys
import phasicrl

assert phasicrl.__file__.startswith(f"{sys.argv[1]}/env/"), f"{phasicrl.__file__} is not the wheel's"
PYTHON
"$bin/phasicrl" --help >/dev/null
if [ -z "$extra" ]; then
  "$bin/phasicrl" train classic-ppo --env.id gymnasium:CartPole-v1 --total-env-steps 65_536 --log.console off
  exit
fi
"$bin/phasicrl" doctor
"$bin/phasicrl" presets >/dev/null
for preset in quickstart cartpole-ppg hopper-ppo; do
  "$bin/phasicrl" train "$preset" --total-env-steps 4096 --name "$preset" --output-dir runs --log.console off
  run=$(ls -d runs/"$preset"*)
  "$bin/phasicrl" resume "$run" >/dev/null
  "$bin/phasicrl" evaluate "$run" --episodes 2
  "$bin/phasicrl" video "$run" --episodes 1
  "$bin/phasicrl" plot "$run"
done
echo "The wheel works outside the checkout."
