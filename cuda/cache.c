#include "cuda/cache.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file is a header, the key and the image. */
typedef struct header {
  char magic[8];
  uint64_t key_bytes, image_bytes;
  uint64_t sum; /* of key and image */
} header;
static const char magic[8] = "omccuda1";

enum { PATH_BYTES = 4096 };

/* Fowler, Noll and Vo's 1a. */
static uint64_t sum_of(uint64_t sum, const void *data, size_t n) {
  for (const unsigned char *p = data, *end = p + n; p < end; p++) sum = (sum ^ *p) * 0x100000001b3u;
  return sum;
}
#define EMPTY_SUM 0xcbf29ce484222325u

/* ~/.cache/ortmodule_c or what XDG_CACHE_HOME says, made if it is not there, but for the home. */
static bool folder(char *out) {
  const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  size_t there = 0; /* of the path, what is not made */
  int n;
  if (cache && *cache == '/')
    n = snprintf(out, PATH_BYTES, "%s", cache);
  else if (home && *home)
    n = snprintf(out, PATH_BYTES, "%s/.cache", home), there = strlen(home);
  else
    return false;
  if (n < 0 || n >= PATH_BYTES - 64) return false;
  strcat(out, "/ortmodule_c");
  for (char *at = out + there; (at = strchr(at + 1, '/')); *at = '/') {
    *at = '\0';
    mkdir(out, 0700);
  }
  mkdir(out, 0700);
  struct stat about;
  return lstat(out, &about) == 0 && S_ISDIR(about.st_mode) && about.st_uid == geteuid() &&
         !(about.st_mode & (S_IWGRP | S_IWOTH));
}

static bool path_of(const char *key, char *out) {
  if (!folder(out)) return false;
  const size_t n = strlen(out);
  snprintf(out + n, PATH_BYTES - n, "/%016llx.cubin",
           (unsigned long long)sum_of(EMPTY_SUM, key, strlen(key)));
  return true;
}

static void *image_of(FILE *file, const char *key, size_t *bytes) {
  header h;
  struct stat about;
  const size_t key_bytes = strlen(key);
  if (fstat(fileno(file), &about) != 0 || about.st_uid != geteuid() ||
      about.st_mode & (S_IWGRP | S_IWOTH) || fread(&h, sizeof h, 1, file) != 1 ||
      memcmp(h.magic, magic, sizeof magic) != 0 || h.key_bytes != key_bytes ||
      about.st_size < (off_t)(sizeof h + key_bytes) ||
      (uint64_t)about.st_size - sizeof h - key_bytes != h.image_bytes)
    return NULL;
  char *all = malloc(key_bytes + h.image_bytes + 1);
  if (!all) return NULL;
  const size_t n = key_bytes + h.image_bytes;
  if (fread(all, 1, n, file) != n || memcmp(all, key, key_bytes) != 0 ||
      sum_of(EMPTY_SUM, all, n) != h.sum) {
    free(all);
    return NULL;
  }
  memmove(all, all + key_bytes, h.image_bytes);
  *bytes = h.image_bytes;
  return all;
}

void *omc_cuda_cache_get(const char *key, size_t *bytes) {
  char path[PATH_BYTES];
  if (!path_of(key, path)) return NULL;
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  FILE *file = fd < 0 ? NULL : fdopen(fd, "rb");
  if (!file) {
    if (fd >= 0) close(fd);
    return NULL;
  }
  void *image = image_of(file, key, bytes);
  fclose(file);
  return image;
}

static bool write_all(FILE *file, const char *key, const void *image, size_t bytes) {
  const size_t key_bytes = strlen(key);
  header h = {.key_bytes = key_bytes, .image_bytes = bytes};
  memcpy(h.magic, magic, sizeof magic);
  h.sum = sum_of(sum_of(EMPTY_SUM, key, key_bytes), image, bytes);
  return fwrite(&h, sizeof h, 1, file) == 1 && fwrite(key, 1, key_bytes, file) == key_bytes &&
         fwrite(image, 1, bytes, file) == bytes;
}

/* Under another name first: who reads finds all of it or nothing. */
void omc_cuda_cache_put(const char *key, const void *image, size_t bytes) {
  char path[PATH_BYTES], fresh[PATH_BYTES];
  if (!path_of(key, path)) return;
  const size_t n = strlen(path);
  if (n + 8 > sizeof fresh) return;
  memcpy(fresh, path, n);
  memcpy(fresh + n, ".XXXXXX", 8);
  const int fd = mkstemp(fresh);
  FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");
  if (!file) {
    if (fd >= 0) close(fd);
    return;
  }
  const bool written = write_all(file, key, image, bytes);
  if (fclose(file) != 0 || !written || rename(fresh, path) != 0) unlink(fresh);
}
