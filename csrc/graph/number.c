#include "graph/number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/element.h"

#define LONGEST 512 /* bytes of a number that is read */

/* The locale's decimal point: what stands between the digits of 1.5. Returns its length. */
static size_t locale_point(char out[OMC_NUMBER_TEXT]) {
  snprintf(out, OMC_NUMBER_TEXT, "%.1f", 1.5);
  const size_t n = strlen(out) - 2;
  memmove(out, out + 1, n);
  out[n] = '\0';
  return n;
}

/* True if the text reads as the same element; NaN never does. */
static bool reads_as(const char *text, double x, omc_dtype dtype) {
  uint64_t a = 0, b = 0;
  omc_element_set_float(dtype, &a, 0, x);
  omc_element_set_float(dtype, &b, 0, strtod(text, NULL));
  return a == b;
}

const char *omc_number_text(double x, omc_dtype dtype, char buf[OMC_NUMBER_TEXT]) {
  if (isnan(x)) return strcpy(buf, "nan");
  if (isinf(x)) return strcpy(buf, x < 0 ? "-inf" : "inf");
  /* Below 1e16 the whole part is written out, not as an exponent. */
  const bool plain = fabs(x) >= 1 && fabs(x) < 1e16;
  for (int digits = plain ? (int)log10(fabs(x)) + 1 : 1; digits <= 17; digits++) {
    snprintf(buf, OMC_NUMBER_TEXT, "%.*g", digits, x);
    if (reads_as(buf, x, dtype)) break;
  }
  char point[OMC_NUMBER_TEXT];
  const size_t n = locale_point(point);
  char *at = strstr(buf, point);
  if (at) {
    *at = '.';
    memmove(at + 1, at + n, strlen(at + n) + 1);
  } else if (!strchr(buf, 'e')) {
    strcat(buf, ".0");
  }
  return buf;
}

bool omc_number_read(const char *text, size_t n, double *out) {
  static const struct {
    const char *text;
    double value;
  } words[] = {{"inf", INFINITY}, {"-inf", -INFINITY}, {"nan", NAN}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (strlen(words[i].text) == n && !memcmp(words[i].text, text, n)) {
      *out = words[i].value;
      return true;
    }
  char buf[LONGEST + OMC_NUMBER_TEXT], point[OMC_NUMBER_TEXT], *end;
  if (n == 0 || n > LONGEST) return false;
  for (size_t i = 0; i < n; i++)
    if (!text[i] || !strchr("+-.eE0123456789", text[i])) return false;
  const char *dot = memchr(text, '.', n);
  const size_t whole = dot ? (size_t)(dot - text) : n;
  const size_t wide = dot ? locale_point(point) : 0, rest = dot ? n - whole - 1 : 0;
  memcpy(buf, text, whole);
  memcpy(buf + whole, point, wide);
  memcpy(buf + whole + wide, text + n - rest, rest);
  buf[whole + wide + rest] = '\0';
  *out = strtod(buf, &end);
  return *end == '\0';
}
