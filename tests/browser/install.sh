#!/usr/bin/env bash
# Chromium for the browser tests: says which is here, or installs Debian's where this is root.
# Fails, loudly, where there is none in the end.
for name in chromium chromium-browser google-chrome; do
    if path=$(command -v "$name"); then
        echo "nbtoolkit: the browser is $path"
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "nbtoolkit: no browser here: installing chromium with apt-get (a minute) ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # One font at least: without any, nothing that is looked at has letters.
    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    if path=$(command -v chromium); then
        echo "nbtoolkit: installed $path"
        exit 0
    fi
fi
echo "nbtoolkit: NO BROWSER, and none could be installed (as root: apt-get install chromium):" \
    "THE PANEL IS NOT CLICKED" >&2
exit 1
