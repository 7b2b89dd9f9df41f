#!/usr/bin/env bash
# Cross-compiles the native kernels for 64-bit ARM and runs pytest with them in an emulator, as a processor with every
# NEON set: emulated_arm.sh PYTHON FOLDER [pytest options]. An interpreter of the same version as PYTHON and its
# packages go to FOLDER; the system is not changed. Needs Debian's g++-aarch64-linux-gnu and qemu-user-static.
set -euo pipefail
python=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
emulator=$(command -v qemu-aarch64-static qemu-aarch64 | head -1) || true
if [[ -z $emulator ]] || ! command -v aarch64-linux-gnu-g++ > /dev/null || ! command -v apt-get > /dev/null; then
  echo "no cross compiler and emulator for ARM: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2
  exit 2
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
system="$folder/system" packages="$folder/packages"

# The interpreter, from the archive of this system: apt with an empty state of its own.
if [[ ! -x $system/usr/bin/python$version ]]; then
  mkdir -p "$folder"/apt/{lists,archives}/partial "$folder/download" "$system"
  : > "$folder/apt/status"
  cat > "$folder/apt/conf" << CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt";
CONF
  export APT_CONFIG="$folder/apt/conf"
  apt-get -qq update
  needed=$(apt-get -s install --no-install-recommends "python$version" "libpython$version-dev" libstdc++6 |
    awk '$1 == "Inst" { print $2 }')
  # shellcheck disable=SC2086
  (cd "$folder/download" && apt-get -qq download $needed && for file in *.deb; do dpkg-deb -x "$file" "$system"; done)
  rm -r "$folder/download"
  unset APT_CONFIG
fi
if [[ ! -d $packages/pytest ]]; then
  "$python" -m pip install --quiet --disable-pip-version-check --target "$packages" --only-binary=:all: \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version "$version" --implementation cp \
    numpy ml_dtypes safetensors click rich jinja2 tokenizers gguf pytest pytest-xdist pytest-random-order hypothesis
fi

suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX").replace("x86_64", "aarch64"))')
"$python" -m cmake -S "$root" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPython_EXECUTABLE="$python" \
  -DPython_INCLUDE_DIR="$system/usr/include/python$version" -DCMAKE_CXX_FLAGS="-isystem $system/usr/include" \
  -DCMAKE_MAKE_PROGRAM="$(dirname "$python")/ninja" -DNB_SUFFIX="$suffix" > "$folder/build.log"
"$python" -m cmake --build "$folder/build" >> "$folder/build.log" || { tail -50 "$folder/build.log" >&2; exit 1; }
rm -rf "$folder/package" && mkdir "$folder/package" && cp -r "$root/src/polyquant" "$folder/package"
rm -f "$folder"/package/polyquant/_native*.so && cp "$folder"/build/_native*.so "$folder/package/polyquant"

# A command for pytest-xdist to start workers with: the system cannot run the interpreter itself.
cat > "$folder/python" << RUN
#!/usr/bin/env bash
export PYTHONHOME=$system/usr PYTHONPATH=$folder/package:$packages
exec $emulator -cpu max -L $system $system/usr/bin/python$version "\$@"
RUN
chmod +x "$folder/python"
cd "$root"
"$folder/python" -m pytest -p no:cacheprovider --dist load --tx "$(nproc)*popen//python=$folder/python" "$@"
