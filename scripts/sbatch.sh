#!/usr/bin/env bash
# Checks job scripts with Slurm's own sbatch, without a cluster. Prints the errors, and exits with 1 if there are any.
#
#   scripts/sbatch.sh examples/bert/slurm.sh ...
#
# sbatch comes from the system's packages, unpacked into .envs/slurm: nothing is installed and nothing is submitted. Exit code 77 if the packages are not available.
set -euo pipefail
cd "$(dirname "$0")/.."

place=$PWD/.envs/slurm
packages=(slurm-client slurm-wlm-basic-plugins libmunge2)
mkdir -p "$place"
exec 9>"$place/lock"
flock 9
if [[ ! -f $place/slurm.conf ]]; then
        command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "there is no apt-get, which brings sbatch" >&2; exit 77; }
        (cd "$place" && apt-get download -qq -o APT::Sandbox::User=root "${packages[@]}" >&2) || { echo "there are no packages ${packages[*]}" >&2; exit 77; }
        for package in "$place"/*.deb; do dpkg -x "$package" "$place"; done
        rm -f "$place"/*.deb
        plugins=$(dirname "$(find "$place" -name cli_filter_none.so -o -name auth_munge.so | head -1)")
        printf '%s\n' ClusterName=none SlurmctldHost=localhost SlurmctldPort=1 MessageTimeout=2 "PluginDir=$plugins" GresTypes=gpu \
                "NodeName=node[1-16] CPUs=64 Gres=gpu:8" "PartitionName=all Nodes=ALL Default=YES" >"$place/slurm.conf"
fi

failed=0
plugins=$(sed -n 's/^PluginDir=//p' "$place/slurm.conf")
for script; do
        # sbatch reads the options of the script before it fails to reach a controller.
        said=$(SLURM_CONF=$place/slurm.conf LD_LIBRARY_PATH=$(dirname "$plugins"):$plugins "$place/usr/bin/sbatch" --test-only "$script" 2>&1) || true
        if [[ $said != *"Unable to contact slurm controller"* ]]; then
                printf '%s: %s\n' "$script" "$said" >&2
                failed=1
        fi
done
exit $failed
