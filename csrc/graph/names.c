#include "graph/names.h"

#include <string.h>

void omc_names_init(omc_names *names, const omc_allocator *allocator) {
  *names = (omc_names){allocator, NULL, 0, 0};
}

void omc_names_deinit(omc_names *names) {
  omc_free(names->allocator, names->slots, names->cap, sizeof *names->slots);
  omc_names_init(names, names->allocator);
}

/* FNV-1a. */
static uint64_t hash(const char *name, size_t n) {
  uint64_t h = 14695981039346656037u;
  for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)name[i]) * 1099511628211u;
  return h ^ h >> 32;
}

/* The slot that holds the name, or the free one where it belongs. */
static omc_value **slot_of(const omc_names *names, const char *name, size_t n) {
  for (size_t i = (size_t)hash(name, n);; i++) {
    omc_value **slot = &names->slots[i & (names->cap - 1)];
    if (!*slot || (strlen((*slot)->name) == n && !memcmp((*slot)->name, name, n))) return slot;
  }
}

omc_value *omc_names_find(const omc_names *names, const char *name, size_t n) {
  return names->cap ? *slot_of(names, name, n) : NULL;
}

static omc_status grow(omc_names *names) {
  omc_names grown = *names;
  grown.cap = names->cap ? 2 * names->cap : 64;
  grown.slots = omc_alloc_zero(names->allocator, grown.cap, sizeof *grown.slots);
  if (!grown.slots) OMC_FAIL(ENOMEM, "no memory for a table of %zu names", names->n);
  for (size_t i = 0; i < names->cap; i++) {
    omc_value *v = names->slots[i];
    if (v) *slot_of(&grown, v->name, strlen(v->name)) = v;
  }
  omc_names_deinit(names);
  *names = grown;
  return OMC_OK;
}

omc_status omc_names_add(omc_names *names, omc_value *v) {
  if (2 * (names->n + 1) > names->cap) OMC_TRY(grow(names));
  omc_value **slot = slot_of(names, v->name, strlen(v->name));
  if (*slot) OMC_FAIL(EINVALID, "%%%s is defined twice", v->name);
  *slot = v;
  names->n++;
  return OMC_OK;
}

bool omc_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c && strchr("_.:/-", c));
}

bool omc_name_valid(const char *name, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (!omc_name_char(name[i])) return false;
  return n > 0;
}
