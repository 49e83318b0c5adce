#!/usr/bin/env bash
# Tries the README's commands on a machine on which nothing is installed: a bare Debian in a folder, with an ordinary user who cannot
# become root, and a clone of what is committed. `make fresh` does, for two releases of Debian.
#
# usage: tools/fresh_machine.sh SUITE [make target ...]     bookworm: Python 3.11; trixie: 3.13; default targets: test train
#   RESULTS=FILE    add a line to this CSV for each command: suite, Python, EnvPool, PyTorch, command, exit status, seconds, commit
#   KEEP=1          keep the folder, whose name is printed
# Needs root (for chroot), debootstrap, 15 GB of disk, and a network. The certificates in SSL_CERT_FILE, if set, are taken along.
set -euo pipefail

suite=${1:?usage: tools/fresh_machine.sh SUITE [make target ...]}
shift
[ $# -gt 0 ] || set -- test train
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
debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates "$suite" "$root" >"$root.log" 2>&1 || {
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
for target in "$@"; do
  echo "--- make $target, Python $python"
  began=$(date +%s)
  status=0
  as_stranger "make $target" || status=$?
  seconds=$(($(date +%s) - began))
  echo "--- make $target: exit $status after $seconds s"
  if [ -n "${RESULTS:-}" ]; then
    torch=$(as_stranger ".venv/bin/python -c 'import torch; print(torch.__version__)'" 2>/dev/null || echo none)
    echo "$suite,$python,$(version_of envpool),$torch,make $target,$status,$seconds,$commit" >>"$RESULTS"
  fi
  [ "$status" = 0 ] || exit "$status"
done
