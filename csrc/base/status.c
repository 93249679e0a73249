#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char detail[1024];

omc_status omc_fail(omc_status code, const char *fmt, ...) {
  char text[sizeof detail]; /* an argument may be the last detail itself */
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  memcpy(detail, text, sizeof detail);
  return code;
}

const char *omc_status_detail(void) { return detail; }

const char *omc_status_text(omc_status code) {
  static const char *const texts[] = {
#define OMC_STATUS(code_, text, exception) text,
#include "base/status.def"
#undef OMC_STATUS
  };
  return code < OMC_N_STATUS ? texts[code] : "unknown status";
}
