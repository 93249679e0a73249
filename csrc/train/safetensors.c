#include "train/safetensors.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "elements are written as they lie in memory"
#endif

enum { LENGTH = 8 /* bytes before the header */, MOST_HEADER = 100 << 20 /* of the format */ };

static const char *const dtype_names[] = {
#define OMC_DTYPE(name, ...) [OMC_##name] = #name,
#include "base/dtype.def"
#undef OMC_DTYPE
};

/* ---- the header, read ---- */

/* Where tensor number `index` is: bytes from one to before the other. */
typedef struct place {
  int64_t begin, end;
  const char *name;
  uint32_t index;
} place;

typedef struct reader {
  const char *begin, *at, *end;
  omc_arena *arena;
  const char *elements; /* after the header, n_bytes of them; NULL: they are read of `file` */
  size_t n_bytes;
  FILE *file;
  const char *path;
  omc_named_tensor *tensors;
  place *places; /* of the tensors */
  omc_named_text *texts;
  uint32_t n_tensors, cap_tensors, cap_places, n_texts, cap_texts;
} reader;

static omc_status expected(const reader *r, const char *what) {
  return omc_fail(OMC_EPARSE, "byte %lld of the header: expected %s", (long long)(r->at - r->begin),
                  what);
}

static void skip_blanks(reader *r) {
  while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at) r->at++;
}

/* Whether the next character is this one; it is taken then. */
static bool take(reader *r, char c) {
  skip_blanks(r);
  if (r->at >= r->end || *r->at != c) return false;
  r->at++;
  return true;
}

static omc_status need(reader *r, char c) {
  const char what[] = {'\'', c, '\'', '\0'};
  return take(r, c) ? OMC_OK : expected(r, what);
}

static bool take_hex(reader *r, uint32_t *out) {
  if (r->end - r->at < 4) return false;
  *out = 0;
  for (int i = 0; i < 4; i++) {
    const char c = r->at[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return false;
    *out = *out * 16 + (uint32_t)digit;
  }
  r->at += 4;
  return true;
}

/* The four digits after \u, and those of the other half if it is one of two. */
static bool take_code_point(reader *r, uint32_t *out) {
  uint32_t low;
  if (!take_hex(r, out) || (*out >= 0xdc00 && *out < 0xe000)) return false;
  if (*out < 0xd800 || *out >= 0xe000) return true;
  if (r->end - r->at < 2 || r->at[0] != '\\' || r->at[1] != 'u') return false;
  r->at += 2;
  if (!take_hex(r, &low) || low < 0xdc00 || low >= 0xe000) return false;
  *out = 0x10000 + ((*out - 0xd800) << 10) + (low - 0xdc00);
  return true;
}

static char *put_utf8(char *to, uint32_t c) {
  if (c < 0x80) {
    *to++ = (char)c;
  } else if (c < 0x800) {
    *to++ = (char)(0xc0 | c >> 6);
    *to++ = (char)(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    *to++ = (char)(0xe0 | c >> 12);
    *to++ = (char)(0x80 | (c >> 6 & 0x3f));
    *to++ = (char)(0x80 | (c & 0x3f));
  } else {
    *to++ = (char)(0xf0 | c >> 18);
    *to++ = (char)(0x80 | (c >> 12 & 0x3f));
    *to++ = (char)(0x80 | (c >> 6 & 0x3f));
    *to++ = (char)(0x80 | (c & 0x3f));
  }
  return to;
}

static const char escapes[] = "\"\\/bfnrt", escaped[] = "\"\\/\b\f\n\r\t";

static omc_status read_string(reader *r, const char **out) {
  OMC_TRY(need(r, '"'));
  const char *end = r->at;
  while (end < r->end && *end != '"') end += *end == '\\' ? 2 : 1;
  if (end >= r->end) return expected(r, "a string that ends");
  char *const text = omc_arena_alloc(r->arena, (size_t)(end - r->at) + 1, 1), *to = text;
  if (!text) OMC_FAIL(ENOMEM, "a string of %lld bytes", (long long)(end - r->at));
  while (r->at < end) {
    const char c = *r->at++;
    if (c == '\0') return expected(r, "text");
    if (c != '\\') {
      *to++ = c;
      continue;
    }
    const char kind = *r->at++;
    const char *const known = kind ? strchr(escapes, kind) : NULL;
    uint32_t code;
    if (known)
      *to++ = escaped[known - escapes];
    else if (kind == 'u' && take_code_point(r, &code) && code)
      to = put_utf8(to, code);
    else
      return expected(r, "an escape of JSON");
  }
  r->at = end + 1;
  *out = text;
  return OMC_OK;
}

static omc_status read_size(reader *r, int64_t *out) {
  skip_blanks(r);
  const char *const from = r->at;
  for (*out = 0; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
    const int digit = *r->at - '0';
    if (*out > (INT64_MAX - digit) / 10) return expected(r, "a number of 63 bits");
    *out = *out * 10 + digit;
  }
  return r->at > from ? OMC_OK : expected(r, "a whole number");
}

/* At most `most` numbers; *n of them there are. */
static omc_status read_sizes(reader *r, int64_t *out, int32_t most, int32_t *n) {
  OMC_TRY(need(r, '['));
  *n = 0;
  if (take(r, ']')) return OMC_OK;
  do {
    if (*n == most)
      OMC_FAIL(EUNSUPPORTED, "byte %lld of the header: more than %d numbers",
               (long long)(r->at - r->begin), most);
    OMC_TRY(read_size(r, &out[(*n)++]));
  } while (take(r, ','));
  return need(r, ']');
}

static omc_status read_texts(reader *r) {
  OMC_TRY(need(r, '{'));
  if (take(r, '}')) return OMC_OK;
  do {
    omc_named_text text;
    OMC_TRY(read_string(r, &text.name));
    OMC_TRY(need(r, ':'));
    OMC_TRY(read_string(r, &text.text));
    r->texts =
        omc_arena_grow(r->arena, r->texts, r->n_texts, &r->cap_texts, r->n_texts + 1, sizeof text);
    if (!r->texts) OMC_FAIL(ENOMEM, "%u texts", r->n_texts);
    r->texts[r->n_texts++] = text;
  } while (take(r, ','));
  return need(r, '}');
}

static omc_status read_dtype(reader *r, const char *tensor, omc_dtype *out) {
  const char *name;
  OMC_TRY(read_string(r, &name));
  for (*out = 0; *out < OMC_N_DTYPE; ++*out)
    if (strcmp(name, dtype_names[*out]) == 0) return OMC_OK;
  OMC_FAIL(EUNSUPPORTED, "'%s' is of dtype '%s'", tensor, name);
}

static omc_status read_tensor(reader *r, const char *name) {
  omc_named_tensor tensor = {.name = name};
  int64_t offsets[2];
  int32_t n_offsets = 0;
  bool has_dtype = false, has_shape = false;
  OMC_TRY(need(r, '{'));
  do {
    const char *key;
    OMC_TRY(read_string(r, &key));
    OMC_TRY(need(r, ':'));
    if (strcmp(key, "dtype") == 0) {
      OMC_TRY(read_dtype(r, name, &tensor.type.dtype));
      has_dtype = true;
    } else if (strcmp(key, "shape") == 0) {
      omc_shape *const shape = &tensor.type.shape;
      OMC_TRY(read_sizes(r, shape->dims, OMC_MAX_RANK, &shape->rank));
      has_shape = true;
    } else if (strcmp(key, "data_offsets") == 0) {
      OMC_TRY(read_sizes(r, offsets, 2, &n_offsets));
    } else {
      return expected(r, "\"dtype\", \"shape\" or \"data_offsets\" before it");
    }
  } while (take(r, ','));
  OMC_TRY(need(r, '}'));
  if (!has_dtype || !has_shape || n_offsets != 2)
    OMC_FAIL(EPARSE, "'%s' lacks its dtype, its shape or where it is", name);
  OMC_TRY(omc_type_bytes(&tensor.type, &tensor.bytes));
  if (offsets[0] > offsets[1] || (uint64_t)offsets[1] > r->n_bytes ||
      (uint64_t)(offsets[1] - offsets[0]) != tensor.bytes)
    OMC_FAIL(EPARSE, "'%s', of %lld bytes, is from byte %lld to %lld of %lld", name,
             (long long)tensor.bytes, (long long)offsets[0], (long long)offsets[1],
             (long long)r->n_bytes);
  r->tensors = omc_arena_grow(r->arena, r->tensors, r->n_tensors, &r->cap_tensors, r->n_tensors + 1,
                              sizeof tensor);
  r->places = omc_arena_grow(r->arena, r->places, r->n_tensors, &r->cap_places, r->n_tensors + 1,
                             sizeof *r->places);
  if (!r->tensors || !r->places) OMC_FAIL(ENOMEM, "%u tensors", r->n_tensors);
  r->places[r->n_tensors] = (place){offsets[0], offsets[1], name, r->n_tensors};
  r->tensors[r->n_tensors++] = tensor;
  return OMC_OK;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const place *)a)->name, ((const place *)b)->name);
}

static int by_begin(const void *a, const void *b) {
  const place *const p = a, *const q = b;
  if (p->begin != q->begin) return p->begin < q->begin ? -1 : 1;
  return (p->end > q->end) - (p->end < q->end);
}

/* Names are met once, and tensors lie one after another, as the format has it. */
static omc_status check_places(const reader *r) {
  place *const places = r->places;
  if (r->n_tensors) qsort(places, r->n_tensors, sizeof *places, by_name);
  for (uint32_t i = 1; i < r->n_tensors; i++)
    if (strcmp(places[i - 1].name, places[i].name) == 0)
      OMC_FAIL(EPARSE, "there are two tensors '%s'", places[i].name);
  if (r->n_tensors) qsort(places, r->n_tensors, sizeof *places, by_begin);
  int64_t end = 0;
  for (uint32_t i = 0; i < r->n_tensors; end = places[i++].end)
    if (places[i].begin != end)
      OMC_FAIL(EPARSE, "'%s' begins at byte %lld, expected %lld", places[i].name,
               (long long)places[i].begin, (long long)end);
  if ((uint64_t)end != r->n_bytes)
    OMC_FAIL(EPARSE, "%lld bytes are those of tensors, of %lld", (long long)end,
             (long long)r->n_bytes);
  return OMC_OK;
}

static omc_status read_header(reader *r) {
  OMC_TRY(need(r, '{'));
  if (!take(r, '}')) {
    do {
      const char *name;
      OMC_TRY(read_string(r, &name));
      OMC_TRY(need(r, ':'));
      OMC_TRY(strcmp(name, "__metadata__") == 0 ? read_texts(r) : read_tensor(r, name));
    } while (take(r, ','));
    OMC_TRY(need(r, '}'));
  }
  skip_blanks(r);
  return r->at == r->end ? OMC_OK : expected(r, "its end");
}

/* ---- the elements ---- */

static omc_status cannot(const char *verb, const char *path) {
  return omc_fail(OMC_EINVALID, "'%s' cannot be %s: %s", path, verb, strerror(errno));
}

/* Gives the tensors their elements, in the order in which they lie. */
static omc_status read_elements(const reader *r) {
  for (const place *p = r->places; p < r->places + r->n_tensors; p++) {
    omc_named_tensor *const tensor = &r->tensors[p->index];
    void *const data = omc_arena_elements(r->arena, tensor->bytes, 1);
    if (!data) OMC_FAIL(ENOMEM, "%lld bytes of '%s'", (long long)tensor->bytes, tensor->name);
    tensor->data = data;
    if (tensor->bytes == 0) continue;
    if (r->elements)
      memcpy(data, r->elements + p->begin, tensor->bytes);
    else if (fread(data, 1, tensor->bytes, r->file) != tensor->bytes)
      return cannot("read", r->path);
  }
  return OMC_OK;
}

static omc_status read_whole(reader *r, omc_safetensors *out) {
  OMC_TRY(read_header(r));
  OMC_TRY(check_places(r));
  OMC_TRY(read_elements(r));
  *out = (omc_safetensors){r->tensors, r->texts, r->n_tensors, r->n_texts};
  return OMC_OK;
}

/* The length of the header of n bytes that begin so. */
static omc_status read_length(const void *bytes, size_t n, size_t *out) {
  uint64_t length = 0;
  if (n >= LENGTH) memcpy(&length, bytes, LENGTH);
  if (n < LENGTH || length > n - LENGTH || length > MOST_HEADER)
    OMC_FAIL(EPARSE, "a header of %llu bytes in a file of %llu", (unsigned long long)length,
             (unsigned long long)n);
  *out = (size_t)length;
  return OMC_OK;
}

omc_status omc_safetensors_parse(const void *bytes, size_t n, omc_arena *arena,
                                 omc_safetensors *out) {
  size_t length = 0;
  OMC_TRY(read_length(bytes, n, &length));
  const char *const header = (const char *)bytes + LENGTH;
  reader r = {.begin = header, .at = header, .end = header + length, .arena = arena};
  r.elements = r.end;
  r.n_bytes = n - LENGTH - length;
  return read_whole(&r, out);
}

/* ---- files ---- */

static omc_status no_file(const char *path) { OMC_FAIL(EINVALID, "'%s' is no file", path); }

/* What is read of the file's n bytes but its elements is in memory of `scratch`. */
static omc_status read_file(FILE *file, size_t n, const char *path, omc_arena *scratch,
                            omc_arena *arena, omc_safetensors *out) {
  char first[LENGTH];
  size_t length = 0;
  if (n >= LENGTH && fread(first, 1, LENGTH, file) != LENGTH) return cannot("read", path);
  OMC_TRY(read_length(first, n, &length));
  char *const header = omc_arena_alloc(scratch, length, 1);
  if (!header) OMC_FAIL(ENOMEM, "a header of %zu bytes", length);
  if (fread(header, 1, length, file) != length) return cannot("read", path);
  reader r = {.begin = header,
              .at = header,
              .end = header + length,
              .arena = arena,
              .n_bytes = n - LENGTH - length,
              .file = file,
              .path = path};
  return read_whole(&r, out);
}

static omc_status read_all(FILE *file, const char *path, omc_arena *arena, omc_safetensors *out) {
  struct stat about;
  if (fstat(fileno(file), &about) != 0) return cannot("read", path);
  if (!S_ISREG(about.st_mode)) return no_file(path);
  omc_arena scratch;
  omc_arena_init(&scratch, arena->allocator);
  const omc_status status = read_file(file, (size_t)about.st_size, path, &scratch, arena, out);
  omc_arena_deinit(&scratch);
  if (status == OMC_OK || status == OMC_ENOMEM || status == OMC_EINVALID) return status;
  return omc_fail(status, "'%s': %s", path, omc_status_detail());
}

omc_status omc_safetensors_read(const char *path, omc_arena *arena, omc_safetensors *out) {
  FILE *const file = fopen(path, "rb");
  if (!file) return cannot("opened", path);
  const omc_status status = read_all(file, path, arena, out);
  (void)fclose(file);
  return status;
}

static void write_string(FILE *file, const char *text) {
  (void)putc('"', file);
  for (const char *c = text; *c; c++) {
    if ((unsigned char)*c >= 0x20 && *c != '"' && *c != '\\')
      (void)putc(*c, file);
    else
      (void)fprintf(file, "\\u%04x", (unsigned)*c);
  }
  (void)putc('"', file);
}

/* What fails is seen once at the end, by ferror. */
static void write_header(FILE *file, const omc_safetensors *f) {
  const char *before = "{\"__metadata__\":{";
  for (uint32_t i = 0; i < f->n_texts; i++, before = ",") {
    (void)fputs(before, file);
    write_string(file, f->texts[i].name);
    (void)putc(':', file);
    write_string(file, f->texts[i].text);
  }
  if (!f->n_texts) (void)fputs(before, file);
  (void)putc('}', file);
  size_t offset = 0;
  for (uint32_t i = 0; i < f->n_tensors; i++) {
    const omc_named_tensor *const t = &f->tensors[i];
    (void)putc(',', file);
    write_string(file, t->name);
    (void)fprintf(file, ":{\"dtype\":\"%s\",\"shape\":[", dtype_names[t->type.dtype]);
    for (int32_t d = 0; d < t->type.shape.rank; d++)
      (void)fprintf(file, "%s%lld", d ? "," : "", (long long)t->type.shape.dims[d]);
    (void)fprintf(file, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                  (unsigned long long)(offset + t->bytes));
    offset += t->bytes;
  }
  (void)putc('}', file);
}

static bool write_all(FILE *file, const omc_safetensors *f) {
  uint64_t length = 0;
  (void)fwrite(&length, 1, LENGTH, file);
  write_header(file, f);
  for (long at = ftell(file); at > 0 && at % LENGTH; at++) (void)putc(' ', file);
  const long end = ftell(file);
  for (uint32_t i = 0; i < f->n_tensors; i++)
    if (f->tensors[i].bytes) (void)fwrite(f->tensors[i].data, 1, f->tensors[i].bytes, file);
  if (end < LENGTH || fseek(file, 0, SEEK_SET) != 0) return false;
  length = (uint64_t)end - LENGTH;
  (void)fwrite(&length, 1, LENGTH, file);
  return fflush(file) == 0 && !ferror(file) && fsync(fileno(file)) == 0;
}

/* Writes `part` and puts it in the place of `path`, of which it gets the mode. */
static omc_status replace(const char *path, const char *part, const omc_safetensors *f) {
  struct stat was;
  const bool exists = stat(path, &was) == 0;
  if (exists && !S_ISREG(was.st_mode)) return no_file(path);
  FILE *const file = fopen(part, "wb");
  if (!file) return cannot("opened", part);
  bool done = write_all(file, f) && (!exists || fchmod(fileno(file), was.st_mode & 07777) == 0);
  const int why = errno;
  done = fclose(file) == 0 && done;
  if (done && rename(part, path) == 0) return OMC_OK;
  if (why) errno = why;
  const omc_status status = cannot("written", path);
  (void)remove(part);
  return status;
}

omc_status omc_safetensors_write(const char *path, const omc_safetensors *f) {
  char *const target = realpath(path, NULL); /* a link stays one */
  const char *const to = target ? target : path;
  char part[PATH_MAX];
  const int n = snprintf(part, sizeof part, "%s.%ld.part", to, (long)getpid());
  omc_status status;
  if (n < 0 || (size_t)n >= sizeof part)
    status = omc_fail(OMC_EINVALID, "a path of more than %d bytes", PATH_MAX - 32);
  else
    status = replace(to, part, f);
  free(target);
  return status;
}

const char *omc_safetensors_text(const omc_safetensors *f, const char *name) {
  for (uint32_t i = 0; i < f->n_texts; i++)
    if (strcmp(f->texts[i].name, name) == 0) return f->texts[i].text;
  return NULL;
}
