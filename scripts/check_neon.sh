#!/bin/sh
# Compiles the kernels for 64-bit ARM and, where an emulator is installed, compares NEON with the portable kernels, which
# the tests hold to the references. Takes about two minutes. On Debian: apt install g++-aarch64-linux-gnu qemu-user
set -eu
cd "$(dirname "$0")/../csrc"
compiler=${CXX_ARM:-aarch64-linux-gnu-g++}
emulator=${EMULATOR_ARM:-qemu-aarch64}
command -v "$compiler" > /dev/null || { echo "no $compiler: install it, or name another in CXX_ARM" >&2; exit 2; }
built=$(mktemp -d)
trap 'rm -r "$built"' EXIT
for file in isa_neon isa_baseline pool dispatch check; do
    "$compiler" -std=c++17 -O2 -ffp-contract=fast -Wall -Wextra -Werror -DTROTH_ARM -c "$file.cpp" -o "$built/$file.o"
done
"$compiler" -static -pthread "$built"/*.o -o "$built/check"
echo "compiled for 64-bit ARM"
if command -v "$emulator" > /dev/null; then
    "$emulator" "$built/check" neon baseline
else
    echo "no $emulator: not run" >&2
fi
