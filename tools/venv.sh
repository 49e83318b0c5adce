#!/bin/sh
# Makes a virtual environment with the first Python that is new enough. Usage: [PYTHON=python3.12] tools/venv.sh FOLDER
set -eu

python=
incomplete=
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
  # Run each one: a name on the PATH may be a shim with nothing behind it.
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
  # Debian ships `venv` without `ensurepip`, and then stops half way with a folder that looks finished.
  if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
    python=$candidate
    break
  fi
  incomplete="$incomplete $candidate"
done

if [ -z "$python" ]; then
  if [ -n "$incomplete" ]; then
    echo "No virtual environment can be made:$incomplete lacks the modules venv and ensurepip." >&2
    echo "On Debian and Ubuntu, as root:   apt install python3-venv" >&2
  elif [ -n "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON is not Python 3.11 or newer." >&2
  else
    echo "phasicrl needs Python 3.11 or newer; none of python3.11 to python3.14 and python3 on the PATH is." >&2
    echo "On Debian 12 and newer, as root:   apt install python3 python3-venv" >&2
    echo "Or name one that lies elsewhere:   make PYTHON=/path/to/python3" >&2
  fi
  exit 1
fi

echo "Making $1 with $("$python" --version)"
# --clear: what is there has no working Python, so it is the rest of an attempt that was cut off.
"$python" -m venv --clear "$1"
