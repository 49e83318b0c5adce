#!/usr/bin/env bash
# Makes this machine a SLURM cluster of two nodes, on which to try the script of docs/distributed.md: for a container or a machine to
# throw away, since it installs Debian's packages and writes /etc/slurm/slurm.conf.
#
# usage: tools/slurm.sh          (root; a network the first time)
set -euo pipefail

[ "$(id -u)" = 0 ] || { echo "SLURM's daemons need root: sudo tools/slurm.sh" >&2; exit 1; }
[ "$(command -v slurmctld slurmd munged sinfo | wc -l)" = 4 ] || {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurmctld slurmd slurm-client munge >/dev/null
}

host=$(hostname -s)
cores=$(nproc)
mkdir -p /etc/slurm /var/lib/slurm/controller /var/log/slurm /run/munge
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=here
SlurmctldHost=$host
SlurmUser=root
StateSaveLocation=/var/lib/slurm/controller
SlurmctldLogFile=/var/log/slurm/controller.log
SlurmdLogFile=/var/log/slurm/%n.log
SlurmdSpoolDir=/var/lib/slurm/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=one NodeHostname=$host Port=17001 CPUs=$cores
NodeName=two NodeHostname=$host Port=17002 CPUs=$cores
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF

chown munge: /run/munge
pgrep -x munged >/dev/null || su -s /bin/sh munge -c /usr/sbin/munged
pgrep -x slurmctld >/dev/null || slurmctld
for node in one two; do
  mkdir -p "/var/lib/slurm/$node"
  pgrep -f "slurmd -N $node" >/dev/null || slurmd -N "$node"
done
for _ in $(seq 30); do
  [ "$(sinfo --noheader --states idle --format %D 2>/dev/null)" = 2 ] && break
  sleep 1
done
sinfo
