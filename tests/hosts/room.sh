# A host's room, in namespaces of its own: no network, its folders, all else as it is outside.
#   unshare --user --map-root-user --mount --net bash room.sh NEW VENV INPUT WORKING RESULTS COMMAND...
# NEW: an empty folder. VENV: the image; what is written there is gone at the end. INPUT: what lies
# in /kaggle/input/wheels, read-only. WORKING: the working folder in the room; Kaggle's is small.
# RESULTS: where its content goes at the end.
set -e
new=$1 venv=$2 input=$3 working=$4 results=$5
shift 5
mount -t tmpfs -o size=2g room "$new"
for entry in /*; do
  case $entry in
    /kaggle | /content) ;;
    *)
      if [ -L "$entry" ]; then
        cp -P "$entry" "$new$entry"
      elif [ -d "$entry" ]; then
        mkdir "$new$entry"
        mount --rbind "$entry" "$new$entry"
      fi
      ;;
  esac
done
mkdir -p "$new$working" "$new/room" "$new/over/upper" "$new/over/work"
layers="lowerdir=$venv,upperdir=$new/over/upper,workdir=$new/over/work"
mount -t overlay -o "$layers,userxattr" session "$new$venv"
case $working in
  /kaggle/*)
    mount -t tmpfs -o size=64m working "$new$working"
    mkdir -p "$new/kaggle/input/wheels"
    mount --bind "$input" "$new/kaggle/input/wheels"
    mount -o remount,bind,ro "$new/kaggle/input/wheels"
    ;;
  *)
    mount -t tmpfs -o size=1g working "$new$working"
    cp "$input"/*.whl "$new$working"
    ;;
esac
ip link set lo up
code=0
HOME=/room chroot "$new" bash -c 'cd "$0" && "$@"' "$working" "$@" || code=$?
rm -f "$new$working"/*.whl
cp -a "$new$working/." "$results"
exit $code
