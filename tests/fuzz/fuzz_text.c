/* libFuzzer entry for the text form of graphs. Build with clang:
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc -Itests/c tests/fuzz/fuzz_text.c \
 *     tests/c/roundtrip.c csrc/base/[a-z]*.c csrc/graph/[a-z]*.c -lm -o fuzz_text */
#include "roundtrip.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (omc_roundtrip(omc_default_allocator(), (const char *)data, size)) __builtin_trap();
  return 0;
}
