/* Status codes and the one place where the detail of a failure is written.
 *
 * Every fallible function returns `omc_status`, which must be looked at. The function in which a
 * failure starts writes its detail (node, argument, numbers) once with OMC_FAIL; all callers pass
 * the code on with OMC_TRY. The detail is kept per thread and read by python/ when it raises. */
#ifndef OMC_BASE_STATUS_H
#define OMC_BASE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
#define OMC_STATUS(code, text, exception) OMC_##code,
#include "base/status.def"
#undef OMC_STATUS
  OMC_N_STATUS
} omc_status_code;

#define OMC_MUST_USE __attribute__((warn_unused_result))
/* Of functions that the C library (train/) has for programs. */
#define OMC_API __attribute__((visibility("default")))
#define OMC_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

typedef omc_status_code omc_status;

/* Writes the detail of a failure for this thread and returns `code`. `code` must not be OMC_OK. */
omc_status omc_fail(omc_status code, const char *fmt, ...) OMC_PRINTF(2, 3) OMC_MUST_USE;

/* The detail written by this thread's last omc_fail; borrowed, valid until its next one. */
OMC_API const char *omc_status_detail(void);

/* The fixed text of a code, for example "shapes do not fit". */
OMC_API const char *omc_status_text(omc_status code);

#define OMC_FAIL(code, ...) return omc_fail(OMC_##code, __VA_ARGS__)

#define OMC_TRY(expr)                        \
  do {                                       \
    omc_status omc_try_ = (expr);            \
    if (omc_try_ != OMC_OK) return omc_try_; \
  } while (0)

#ifdef __cplusplus
}
#endif

#endif
