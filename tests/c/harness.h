/* Tests of the C core: TEST(name) { CHECK_INT(f(2), 4); } in any test_MODULE.c is found and run
 * by runner.c. A check that fails prints both sides and the test goes on; REQUIRE_* ends it. */
#ifndef OMC_TESTS_HARNESS_H
#define OMC_TESTS_HARNESS_H

#include "base/alloc.h"
#include "base/status.h"

#include <stdint.h>

typedef struct omc_test {
  const char *name;
  void (*run)(void);
  struct omc_test *next;
} omc_test;

void omc_test_register(omc_test *test);

#define TEST(name_)                                                 \
  static void name_(void);                                          \
  __attribute__((constructor)) static void register_##name_(void) { \
    static omc_test test = {#name_, name_, NULL};                   \
    omc_test_register(&test);                                       \
  }                                                                 \
  static void name_(void)

/* Each returns whether the check holds. `a` is what was found, `b` what it should be. */
bool omc_check(bool ok, const char *text, const char *file, int line);
bool omc_check_int(int64_t a, int64_t b, const char *text, const char *file, int line);
bool omc_check_float(double a, double b, const char *text, const char *file, int line);
bool omc_check_text(const char *a, const char *b, const char *text, const char *file, int line);
bool omc_check_contains(const char *a, const char *b, const char *text, const char *file, int line);
bool omc_check_status(omc_status a, omc_status b, const char *text, const char *file, int line);

#define CHECK(ok) omc_check((ok), #ok, __FILE__, __LINE__)
#define CHECK_INT(a, b) omc_check_int((int64_t)(a), (int64_t)(b), #a, __FILE__, __LINE__)
/* The same bits, or both NaN. */
#define CHECK_FLOAT(a, b) omc_check_float((a), (b), #a, __FILE__, __LINE__)
#define CHECK_TEXT(a, b) omc_check_text((a), (b), #a, __FILE__, __LINE__)
#define CHECK_CONTAINS(a, b) omc_check_contains((a), (b), #a, __FILE__, __LINE__)
#define CHECK_STATUS(a, b) omc_check_status((a), OMC_##b, #a, __FILE__, __LINE__)
#define CHECK_OK(a) CHECK_STATUS(a, OK)
#define REQUIRE(ok)         \
  do {                      \
    if (!CHECK(ok)) return; \
  } while (0)
#define REQUIRE_OK(a)         \
  do {                        \
    if (!CHECK_OK(a)) return; \
  } while (0)

/* Counts what is live and fails allocation number `fail_at` (from 0) and all after it. */
typedef struct omc_test_memory {
  omc_allocator allocator;
  size_t calls, fail_at;
  size_t live_blocks, live_bytes;
} omc_test_memory;

/* Never fails before fail_at is set. */
void omc_test_memory_init(omc_test_memory *memory);

#endif
