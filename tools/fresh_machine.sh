#!/usr/bin/env bash
# Tries `make test` and `make train` on a machine on which nothing is installed: a bare Debian in a folder, with an ordinary user who cannot
# become root, and a clone of what is committed. `make fresh` does, for two releases of Debian.
#
# usage: tools/fresh_machine.sh SUITE [COMMAND ...]     bookworm: Python 3.11; trixie: 3.13; default commands: make test, make train
#   PREFIX=FOLDER   have the Python in this folder, as /usr/local, in place of Debian's, and no make and no git: what an image
#                   python:3.12-slim is, if the folder is ~/.pyenv/versions/3.12.1, say; default commands: pip install, PPG on Procgen
#   RESULTS=FILE    add a line to this CSV for each command: suite, Python, EnvPool, PyTorch, command, exit status, seconds, commit
#   KEEP=1          keep the folder, whose name is printed
# Needs root (for chroot), debootstrap, 15 GB of disk, and a network. The certificates in SSL_CERT_FILE, if set, are taken along.
set -euo pipefail

suite=${1:?usage: tools/fresh_machine.sh SUITE [COMMAND ...]}
shift
if [ -n "${PREFIX:-}" ]; then
  packages=ca-certificates,netbase,tzdata,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g
  [ $# -gt 0 ] || set -- "python3 -m venv .venv && .venv/bin/pip install --quiet --constraint constraints.txt ." \
    ".venv/bin/phasicrl train quickstart --total-env-steps 16384"
else
  packages=ca-certificates,python3,python3-venv,make,git
  [ $# -gt 0 ] || set -- "make test" "make train"
fi
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
commit=$(git -C "$checkout" rev-parse --short HEAD)
[ "$(id -u)" = 0 ] || { echo "A bare machine is made with chroot, which needs root: sudo tools/fresh_machine.sh $suite" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "debootstrap is not here; on Debian and Ubuntu: apt install debootstrap" >&2; exit 1; }

root=$(mktemp -d "${TMPDIR:-/tmp}/fresh-$suite.XXXX")
chmod 755 "$root"
mounted=()
tidy() {
  for folder in "${mounted[@]}"; do umount --lazy "$folder" || true; done
  if [ -n "${KEEP:-}" ]; then echo "kept: $root"; else rm -rf --one-file-system "$root"; fi
}
trap tidy EXIT

echo "Making a bare $suite in $root"
debootstrap --variant=minbase --include="$packages" "$suite" "$root" >"$root.log" 2>&1 || {
  tail -5 "$root.log" >&2
  exit 1
}
rm -f "$root.log"
for folder in proc sys dev; do
  mount --bind "/$folder" "$root/$folder"
  mount --make-private "$root/$folder"
  mounted=("$root/$folder" "${mounted[@]}")
done
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mounted=("$root/dev/shm" "${mounted[@]}")
cp /etc/resolv.conf /etc/hosts "$root/etc/"
if [ -f "${SSL_CERT_FILE:-}" ]; then cp "$SSL_CERT_FILE" "$root/etc/ssl/certs/ca-certificates.crt"; fi
if [ -n "${PREFIX:-}" ]; then cp --archive "$PREFIX/." "$root/usr/local/" && chroot "$root" ldconfig; fi
chroot "$root" useradd --create-home stranger
git clone --quiet "$checkout" "$root/home/stranger/phasicrl"
chroot "$root" chown -R stranger /home/stranger/phasicrl

as_stranger() {
  chroot "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/stranger USER=stranger LANG=C.UTF-8 TERM=dumb \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DEFAULT_TIMEOUT=180 \
    su stranger --preserve-environment -c "cd ~/phasicrl && $1" </dev/null
}
version_of() { as_stranger ".venv/bin/python -c 'from importlib.metadata import version; print(version(\"$1\"))'" 2>/dev/null || echo none; }

python=$(as_stranger "python3 -c 'import platform; print(platform.python_version())'")
for command in "$@"; do
  echo "--- $command, Python $python"
  began=$(date +%s)
  status=0
  as_stranger "$command" || status=$?
  seconds=$(($(date +%s) - began))
  echo "--- $command: exit $status after $seconds s"
  if [ -n "${RESULTS:-}" ]; then
    torch=$(as_stranger ".venv/bin/python -c 'import torch; print(torch.__version__)'" 2>/dev/null || echo none)
    echo "$suite${PREFIX:+ (slim)},$python,$(version_of envpool),$torch,\"$command\",$status,$seconds,$commit" >>"$RESULTS"
  fi
  [ "$status" = 0 ] || exit "$status"
done
