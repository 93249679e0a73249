#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"

static omc_test *tests;
static int failures; /* of the test that runs */

void omc_test_register(omc_test *test) {
  omc_test **at = &tests;
  while (*at && strcmp((*at)->name, test->name) < 0) at = &(*at)->next;
  test->next = *at;
  *at = test;
}

static bool report(bool ok, const char *file, int line, const char *text) {
  if (ok) return true;
  failures++;
  printf("%s:%d: %s\n", file, line, text);
  return false;
}

bool omc_check(bool ok, const char *text, const char *file, int line) {
  return report(ok, file, line, text);
}

bool omc_check_int(int64_t a, int64_t b, const char *text, const char *file, int line) {
  if (a != b) printf("  found %lld, expected %lld\n", (long long)a, (long long)b);
  return report(a == b, file, line, text);
}

bool omc_check_float(double a, double b, const char *text, const char *file, int line) {
  const bool ok = memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
  if (!ok) printf("  found %.17g, expected %.17g\n", a, b);
  return report(ok, file, line, text);
}

bool omc_check_text(const char *a, const char *b, const char *text, const char *file, int line) {
  const bool ok = a && b && !strcmp(a, b);
  if (!ok) printf("  found:\n%s\n  expected:\n%s\n", a ? a : "NULL", b ? b : "NULL");
  return report(ok, file, line, text);
}

bool omc_check_contains(const char *a, const char *b, const char *text, const char *file,
                        int line) {
  const bool ok = a && strstr(a, b);
  if (!ok) printf("  found:\n%s\n  expected it to contain:\n%s\n", a ? a : "NULL", b);
  return report(ok, file, line, text);
}

bool omc_check_status(omc_status a, omc_status b, const char *text, const char *file, int line) {
  if (a != b)
    printf("  found '%s' (%s), expected '%s'\n", omc_status_text(a),
           a == OMC_OK ? "" : omc_status_detail(), omc_status_text(b));
  return report(a == b, file, line, text);
}

static void *counted_alloc(void *ctx, size_t bytes) {
  omc_test_memory *memory = ctx;
  if (memory->calls++ >= memory->fail_at) return NULL;
  void *ptr = malloc(bytes);
  if (!ptr) return NULL;
  memset(ptr, 0xA5, bytes); /* nobody may count on what it holds */
  memory->live_blocks++;
  memory->live_bytes += bytes;
  return ptr;
}

static void counted_free(void *ctx, void *ptr, size_t bytes) {
  omc_test_memory *memory = ctx;
  if (!ptr) return;
  memory->live_blocks--;
  memory->live_bytes -= bytes;
  free(ptr);
}

void omc_test_memory_init(omc_test_memory *memory) {
  *memory = (omc_test_memory){{counted_alloc, counted_free, memory}, 0, SIZE_MAX, 0, 0};
}

/* Runs every test, or those whose name contains the one argument. */
int main(int argc, char **argv) {
  int passed = 0, failed = 0;
  if (omc_env_load() != OMC_OK) {
    printf("%s\n", omc_status_detail());
    return 1;
  }
  for (const omc_test *test = tests; test; test = test->next) {
    if (argc > 1 && !strstr(test->name, argv[1])) continue;
    failures = 0;
    test->run();
    if (failures) printf("FAILED %s\n", test->name);
    *(failures ? &failed : &passed) += 1;
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
