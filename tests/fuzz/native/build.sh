#!/usr/bin/env bash
# Builds the libFuzzer targets of the native kernels, with address and undefined-behaviour sanitizers: build.sh FOLDER.
# Needs clang with compiler-rt. Then: FUZZ=dequantize FOLDER/kernels -runs=1000000
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
python3 - "$root/src/polyquant/codecs/iq_codebooks.bin" > "$out/iq_codebooks.inc" <<'PY'
import struct, sys
raw = open(sys.argv[1], "rb").read()
print(",\n".join(f"0x{n:04x}" for (n,) in struct.iter_unpack("<H", raw)) + ",")
PY
flags=(-std=c++20 -O1 -DPOLYQUANT_NO_CLONES -ffp-contract=off -fno-math-errno -fno-trapping-math -I"$root/native" -I"$out"
  -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow,local-bounds -fno-sanitize-recover=all)
avx2="-mavx2 -mfma -mf16c" avx512="-mavx512f -mavx512bw -mavx512vl"
sets() {  # the flags of a file: those of CMakeLists.txt
  case $1 in
    trellis_vnni) echo "$avx2 $avx512 -mavx512vnni -mavx512vbmi" ;;
    trellis_fp16) echo "$avx2 $avx512 -mavx512vnni -mavx512vbmi -mavx512fp16" ;;
    grouped_bf16) echo "$avx2 $avx512 -mavx512vnni -mavx512vbmi -mavx512bf16" ;;
    *_avx2) echo "$avx2" ;;
    *_avx_vnni) echo "$avx2 -DPQ_AVX_VNNI" ;;
    *_avx512) echo "$avx2 $avx512" ;;
    *_amx) echo "$avx2 $avx512 -mamx-tile -mamx-int8" ;;
    *_vnni) echo "$avx2 $avx512 -mavx512vnni -mprefer-vector-width=256" ;;
  esac
}
objects=()
for file in "$root"/native/*.cpp "$root"/native/*/*.cpp "$root"/tests/fuzz/native/*.cpp; do
  [[ $file == */native/bindings/* ]] && continue
  name=${file#"$root"/native/}
  name=${name%.cpp} name=${name//\//_}
  # Comparisons inside kernels are of loop counters: tracing them takes four fifths of the time and finds no input.
  coverage=-fno-sanitize-coverage=trace-cmp
  [[ $file == */fuzz/native/* ]] && name=fuzz_$(basename "$file" .cpp) coverage=
  object="$out/$name.o"
  objects+=("$object")
  while (($(jobs -rp | wc -l) >= 2)); do wait -n; done
  # shellcheck disable=SC2046,SC2086
  [[ $object -nt $file ]] || clang++ "${flags[@]}" $coverage $(sets "$name") -c "$file" -o "$object" &
done
wait
clang++ -fsanitize=fuzzer,address,undefined "${objects[@]}" -lpthread -o "$out/kernels"
