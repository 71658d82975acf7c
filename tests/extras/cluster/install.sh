#!/usr/bin/env bash
# The tools that read and run the scripts of `nbtoolkit recipe`, where this machine can install them:
#
#   install.sh [PACKAGE ...]    default: shellcheck slurm-wlm munge
set -e
packages=("$@")
[ "$#" -gt 0 ] || packages=(shellcheck slurm-wlm munge)
if dpkg --status "${packages[@]}" > /dev/null 2>&1; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "nbtoolkit: NOT INSTALLED: ${packages[*]}: THEIR TESTS ARE SKIPPED" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null
