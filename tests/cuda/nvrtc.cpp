/* A stand-in for NVRTC: the host's C++ compiler makes a library of a program, see emulator.h, by
 * the flags of EMULATED_FLAGS too. 32 bits hold no more than EMULATED_NARROW_BITS.
 * VERSION is another for any change of it, so that nothing is kept of an earlier one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "emulated.h"

namespace {

struct program {
  std::string source, log, image;
  std::vector<std::pair<std::string, std::string>> headers;
};
enum { SUCCESS = 0, OUT_OF_MEMORY = 1, COMPILATION = 6, INTERNAL_ERROR = 11 };

#define ENTER                                                                     \
  if (const int error = emulated_fails_by_name(__func__)) /* one of the driver */ \
    return error == 2 ? OUT_OF_MEMORY : INTERNAL_ERROR;

/* Of threads that compile, which the process must not end under. */
struct at_work {
  std::atomic<int> threads{0};
  ~at_work() {
    if (threads) fputs("nvrtc: the process ends while it compiles\n", stderr), _exit(70);
  }
} at_work;
struct working {
  working() { at_work.threads++; }
  ~working() { at_work.threads--; }
};

std::string read(const std::string &path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write(const std::string &path, const std::string &text) {
  std::ofstream(path, std::ios::binary) << text;
}

void make_folders(const std::string &root, const std::string &name) {
  for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1))
    mkdir((root + "/" + name.substr(0, at)).c_str(), 0700);
}

/* A cubin says how long it is; so does this. */
std::string wrapped(const std::string &library) {
  const uint64_t size = library.size();
  return "EMULATED" + std::string((const char *)&size, sizeof size) + library;
}

/* For whoever wants the sources alone. */
int keep_source(const program *p, const std::string &folder) {
  write(folder + "/" + std::to_string(std::hash<std::string>()(p->source)) + ".cu", p->source);
  return COMPILATION;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int nvrtcVersion(int *major, int *minor) {
  ENTER
  *major = 13, *minor = VERSION;
  return SUCCESS;
}
EXPORT int nvrtcGetNumSupportedArchs(int *n) {
  ENTER
  *n = 2;
  return SUCCESS;
}
EXPORT int nvrtcGetSupportedArchs(int *architectures) {
  ENTER
  architectures[0] = 80, architectures[1] = emulated_number("EMULATED_COMPILED", 90);
  return SUCCESS;
}
EXPORT const char *nvrtcGetErrorString(int error) {
  return error == SUCCESS         ? "NVRTC_SUCCESS"
         : error == OUT_OF_MEMORY ? "NVRTC_ERROR_OUT_OF_MEMORY"
         : error == COMPILATION   ? "NVRTC_ERROR_COMPILATION"
                                  : "NVRTC_ERROR_INTERNAL_ERROR";
}

EXPORT int nvrtcCreateProgram(void **out, const char *source, const char *, int n,
                              const char *const *headers, const char *const *names) {
  ENTER
  program *p = new program{source, {}, {}, {}};
  for (int i = 0; i < n; i++) p->headers.emplace_back(names[i], headers[i]);
  *out = p;
  return SUCCESS;
}

EXPORT int nvrtcCompileProgram(void *handle, int, const char *const *) {
  const working now;
  program *p = (program *)handle;
  ENTER
  if (const char *kept = getenv("EMULATED_SOURCES")) return keep_source(p, kept);
  char root[] = "/tmp/emulated.XXXXXX";
  if (!mkdtemp(root)) return COMPILATION;
  const std::string folder = root;
  for (const auto &[name, text] : p->headers) {
    make_folders(folder, name);
    write(folder + "/" + name, text);
  }
  write(folder + "/unit.cpp", p->source);
  const char *const flags = getenv("EMULATED_FLAGS");
  const std::string command =
      "g++ -std=c++17 -O1 -ffp-contract=off -fwrapv -fno-math-errno -w -fPIC "
      "-shared -DOMC_EMULATED -DOMC_NARROW_BITS=" +
      std::to_string(emulated_number("EMULATED_NARROW_BITS", 31)) + " -I" EMULATOR " " +
      std::string(flags ? flags : "") + " -I" + folder + " " + folder + "/unit.cpp -o " + folder +
      "/unit.so 2> " + folder + "/log";
  const bool made = system(command.c_str()) == 0;
  p->log = read(folder + "/log");
  if (made) p->image = wrapped(read(folder + "/unit.so"));
  if (system(("rm -rf " + folder).c_str()) != 0) return COMPILATION;
  return made ? SUCCESS : COMPILATION;
}

EXPORT int nvrtcGetProgramLogSize(void *handle, size_t *bytes) {
  ENTER
  *bytes = ((program *)handle)->log.size() + 1;
  return SUCCESS;
}
EXPORT int nvrtcGetProgramLog(void *handle, char *log) {
  ENTER
  strcpy(log, ((program *)handle)->log.c_str());
  return SUCCESS;
}
EXPORT int nvrtcGetCUBINSize(void *handle, size_t *bytes) {
  ENTER
  *bytes = ((program *)handle)->image.size();
  return SUCCESS;
}
EXPORT int nvrtcGetCUBIN(void *handle, char *image) {
  ENTER
  const std::string &from = ((program *)handle)->image;
  memcpy(image, from.data(), from.size());
  return SUCCESS;
}
EXPORT int nvrtcDestroyProgram(void **handle) {
  delete (program *)*handle;
  *handle = nullptr;
  return SUCCESS;
}
