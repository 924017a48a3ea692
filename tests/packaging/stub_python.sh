#!/usr/bin/env bash
# Stands for an interpreter in the tests of ./kunlun: answers what the script asks, records each call in $CALLS, and
# fails where FAIL (an extended regular expression on the call) says so, with FAIL_TEXT as its output.
set -u
here=$(cd "$(dirname "$0")" && pwd)
call="$*"
printf '%s\n' "${call//$'\n'/ }" >>"$CALLS"
version=${STUB_VERSION:-3.11.7}
if [[ -n ${FAIL:-} && $call =~ $FAIL ]]; then
    printf '%s\n' "${FAIL_TEXT:-failed}"
    exit 1
fi
case $call in
    *"import sys, ensurepip, venv"*) [[ $version =~ ^3\.1[0-3]\. ]] || exit 1 ;;
    *platform.python_version*) echo "$version" ;;
    -) cat >/dev/null && echo "$version" ;;
    *"import sys; print(\"cp"*) echo cp311 ;;
    "-m venv "*)
        sleep "${STUB_VENV_SECONDS:-0}"
        mkdir -p "$3/bin"
        cp "$here/${0##*/}" "$3/bin/python"
        printf '#!/usr/bin/env bash\necho ran "$@"\n' >"$3/bin/vllm-kunlun"
        chmod +x "$3/bin/vllm-kunlun"
        ;;
    *"version('"*) exit 1 ;;  # nothing is installed yet
    *"pip --quiet wheel"*)
        folder=${call#*--wheel-dir } && touch "${folder%% *}/vllm-0.25.1-cp311-none-any.whl" ;;
    "-m vllm_kunlun.ops.native"*)
        touch "$here/kernels.so" && echo "host kernels: $here/kernels.so (1.0 s)" ;;
esac
exit 0
