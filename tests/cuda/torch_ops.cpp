/* A stand-in for what PyTorch for CUDA exports of its ops: tensors over memory of the device, and
 * convolutions of them, which PyTorch for the CPU computes in the stream that is current. It
 * says what its user does wrong, gives everything other numbers than PyTorch's, and fails when it
 * is told to. Declarations are PyTorch's own: who calls it otherwise is not compiled. */
#define USE_CUDA
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/c/shim.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "emulated.h"

/* ---- what the provider declares ---- */

namespace {

/* Handles are pointers to it. */
template <typename A, typename B>
constexpr bool fits = std::is_same_v<A, B> || (std::is_pointer_v<A> && std::is_pointer_v<B>);

template <typename A, typename B>
struct agree : std::false_type {};
template <typename A, typename B, typename... As, typename... Bs>
struct agree<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(As) != sizeof...(Bs))
      return false;
    else
      return fits<A, B> && (fits<As, Bs> && ...);
  }();
};

#define DRIVER(name, type)
#define NVRTC(name, type)
#define CUBLASLT(name, type)
#define TORCH(name, type) \
  static_assert(agree<decltype(&::name), type>::value, #name " is declared otherwise by PyTorch");
#define OMC_CUDA_API(library, result, name, parameters) library(name, result(*) parameters)
#include "cuda/api.def"
#undef OMC_CUDA_API

/* ---- tensors ---- */

typedef std::vector<int64_t> numbers;

struct tensor {
  char *data;
  numbers dims, strides;
  int32_t dtype, device;
  bool owned; /* memory of PyTorch's */
};

enum { F32 = 1032, F64 = 1064, F16 = 1016, BF16 = 1116, DEVICE_TYPE = 77 };

std::mutex mutex; /* of what follows */
std::set<const tensor *> tensors;
bool channels_last;

thread_local std::string said;

int fail(const std::string &what) {
  said = what;
  return AOTI_TORCH_FAILURE;
}
}  // namespace

extern "C" int cuGetErrorString(int error, const char **text);
extern "C" int emulated_driver_failed(int error) {
  const char *text = "unknown";
  cuGetErrorString(error, &text);
  return fail(error == 2 ? "CUDA out of memory. Tried to allocate 20.00 MiB."
                         : std::string("CUDA error: ") + text);
}

namespace {

int mistake(const std::string &what) {
  emulated_mistake(("PyTorch: " + what).c_str());
  return fail(what);
}

#define ENTER                                                             \
  if (const int error = emulated_fails(__func__)) /* one of the driver */ \
    return emulated_driver_failed(error);

#define REQUIRE(condition)                                                               \
  do                                                                                     \
    if (!(condition)) return mistake(std::string(__func__) + " needs that " #condition); \
  while (0)

/* Meanwhile a device is current. */
struct guard {
  const int before;
  explicit guard(int device) : before(emulated_exchange_device(device)) {}
  ~guard() { emulated_restore_device(before); }
};

int64_t size_of(int32_t dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

int64_t numel_of(const numbers &dims) {
  int64_t n = 1;
  for (const int64_t dim : dims) n *= dim;
  return n;
}

numbers dense_strides_of(const numbers &dims) {
  numbers strides(dims.size(), 1);
  for (size_t d = dims.size(); d-- > 1;) strides[d - 1] = strides[d] * dims[d];
  return strides;
}

int64_t extent_of(const tensor &t) {
  int64_t last = 0;
  for (size_t d = 0; d < t.dims.size(); d++) {
    if (t.dims[d] == 0) return 0;
    last += (t.dims[d] - 1) * t.strides[d];
  }
  return (last + 1) * size_of(t.dtype);
}

bool is_out(const void *handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  return tensors.count((const tensor *)handle);
}
AtenTensorHandle added(const tensor &t) {
  const std::lock_guard<std::mutex> lock(mutex);
  return (AtenTensorHandle)*tensors.insert(new tensor(t)).first;
}

/* As PyTorch tells it: strides do not shrink from channels on outwards, the batch being last. */
bool is_channels_last(const tensor &t) {
  int64_t least = 0;
  if (t.dims.size() != 4 || t.strides[1] == 0) return false;
  for (const size_t d : {1, 3, 2, 0}) {
    if (t.dims[d] == 0 || t.strides[d] < least || (d == 0 && least == t.strides[1])) return false;
    least = t.strides[d] * (t.dims[d] > 1 ? t.dims[d] : 1);
  }
  return true;
}

/* Of a result of these, of 64 bits never with channels last. */
numbers strides_of(const numbers &dims, const tensor &x, const tensor &w) {
  numbers strides(dims.size(), 1);
  const bool asked = x.dtype != F64 && (is_channels_last(x) || is_channels_last(w));
  const bool moved = (channels_last || asked) && dims.size() > 2;
  std::vector<size_t> order; /* the innermost first */
  if (moved) order.push_back(1);
  for (size_t d = dims.size(); d-- > 0;)
    if (!moved || d != 1) order.push_back(d);
  for (size_t i = 1; i < order.size(); i++)
    strides[order[i]] = strides[order[i - 1]] * dims[order[i - 1]];
  return strides;
}

/* ---- PyTorch for the CPU ---- */

template <typename F>
F *real(const char *name) {
  static void *const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return (F *)(library ? dlsym(library, name) : nullptr);
}
#define REAL(name) real<decltype(name)>(#name)

/* Autocast would cast what ops are given. */
bool casts() {
  const auto is_on = real<bool(int8_t)>("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE");
  return !is_on || is_on(0 /* the CPU */);
}

int32_t real_dtype(int32_t dtype) {
  return dtype == F32   ? REAL(aoti_torch_dtype_float32)()
         : dtype == F64 ? REAL(aoti_torch_dtype_float64)()
         : dtype == F16 ? REAL(aoti_torch_dtype_float16)()
                        : REAL(aoti_torch_dtype_bfloat16)();
}

struct real_tensor {
  AtenTensorHandle handle = nullptr;
  real_tensor() = default;
  explicit real_tensor(const tensor &t) : real_tensor(t, t.data, t.strides) {}
  real_tensor(const tensor &t, char *data, const numbers &strides) {
    const int error = REAL(aoti_torch_create_tensor_from_blob)(
        data, (int64_t)t.dims.size(), t.dims.data(), strides.data(), 0, real_dtype(t.dtype),
        REAL(aoti_torch_device_type_cpu)(), 0, &handle);
    if (error) handle = nullptr;
  }
  real_tensor(const real_tensor &) = delete;
  ~real_tensor() {
    if (handle) REAL(aoti_torch_delete_tensor_object)(handle);
  }
};

/* A dense copy: PyTorch 2.13 for the CPU writes past the end of a gradient of 16 bits by kernels of
 * one place two apart, with a batch of 1 and channels last. */
struct dense_tensor {
  std::vector<char> room;
  real_tensor copy;
  explicit dense_tensor(const tensor &t)
      : room((size_t)(numel_of(t.dims) * size_of(t.dtype)) + 1),
        copy(t, room.data(), dense_strides_of(t.dims)) {
    REAL(aoti_torch_copy_)(copy.handle, real_tensor(t).handle, 0);
  }
};

struct windows {
  numbers stride, padding, dilation, output_padding;
  int32_t transposed;
  int64_t groups;
};

/* A call, by value: its tensors may be gone when the stream comes to it. */
struct job {
  std::vector<tensor> given;
  bool biased;
  windows by;
  std::vector<int32_t> wanted; /* of a gradient */
  tensor to;
};

int convolve(const job &j, AtenTensorHandle *out) {
  const windows &b = j.by;
  const dense_tensor x(j.given[0]), w(j.given[1]);
  const real_tensor bias = j.biased ? real_tensor(j.given[2]) : real_tensor();
  AtenTensorHandle added_up = bias.handle;
  return REAL(aoti_torch_cpu_convolution)(
      x.copy.handle, w.copy.handle, j.biased ? &added_up : nullptr, b.stride.data(),
      (int64_t)b.stride.size(), b.padding.data(), (int64_t)b.padding.size(), b.dilation.data(),
      (int64_t)b.dilation.size(), b.transposed, b.output_padding.data(),
      (int64_t)b.output_padding.size(), b.groups, out);
}

int go_back(const job &j, AtenTensorHandle *out) {
  const windows &b = j.by;
  const dense_tensor dy(j.given[0]), x(j.given[1]), w(j.given[2]);
  AtenTensorHandle *const dx = j.wanted[0] ? out : nullptr, *const dw = j.wanted[0] ? nullptr : out;
  return REAL(aoti_torch_cpu_convolution_backward)(
      dy.copy.handle, x.copy.handle, w.copy.handle, nullptr, 0, b.stride.data(),
      (int64_t)b.stride.size(), b.padding.data(), (int64_t)b.padding.size(), b.dilation.data(),
      (int64_t)b.dilation.size(), b.transposed, b.output_padding.data(),
      (int64_t)b.output_padding.size(), b.groups, j.wanted.data(), 3, dx, dw, nullptr);
}

/* In the stream. */
int done(void *given) {
  const job *j = (const job *)given;
  real_tensor result;
  const int error = (j->wanted.empty() ? convolve : go_back)(*j, &result.handle);
  if (error || REAL(aoti_torch_copy_)(real_tensor(j->to).handle, result.handle, 0))
    mistake(REAL(torch_exception_get_what_without_backtrace)());
  return 0;
}

void drop(void *given) { delete (job *)given; }

int give(job *j, const numbers &dims, AtenTensorHandle *out) {
  void *data = nullptr;
  const int device = j->given[0].device;
  const guard now(device);
  const size_t last = j->wanted.empty() ? 1 : 2;
  const numbers strides = strides_of(dims, j->given[last - 1], j->given[last]);
  j->to = {nullptr, dims, strides, j->given[0].dtype, device, true};
  if (aoti_torch_cuda_caching_allocator_raw_alloc((uint64_t)extent_of(j->to), &data) != 0) {
    delete j;
    return fail("CUDA out of memory. Tried to allocate 20.00 MiB.");
  }
  j->to.data = (char *)data;
  *out = added(j->to);
  return emulated_give(emulated_used(device), done, j, drop) ? fail("CUDA error")
                                                             : AOTI_TORCH_SUCCESS;
}

/* One list of numbers for each axis of x. */
bool is_for(const windows &b, const tensor &x) {
  const size_t axes = x.dims.size() - 2;
  return b.stride.size() == axes && b.padding.size() == axes && b.dilation.size() == axes &&
         b.output_padding.size() == axes;
}

numbers dims_of(const tensor &x, const tensor &w, const windows &b) {
  numbers dims = {x.dims[0], b.transposed ? w.dims[1] * b.groups : w.dims[0]};
  for (size_t a = 0; a + 2 < x.dims.size(); a++) {
    const int64_t n = x.dims[a + 2], span = b.dilation[a] * (w.dims[a + 2] - 1) + 1;
    dims.push_back(b.transposed
                       ? (n - 1) * b.stride[a] + span - 2 * b.padding[a] + b.output_padding[a]
                       : (n + 2 * b.padding[a] - span) / b.stride[a] + 1);
  }
  return dims;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/* ---- what PyTorch exports ---- */

/* EMULATED_SILENT=1: as in PyTorch before 2.13, which has no such function. */
EXPORT const char *torch_exception_get_what_without_backtrace() {
  return emulated_number("EMULATED_SILENT", 0) ? nullptr : said.c_str();
}

EXPORT int32_t aoti_torch_device_type_cuda() { return DEVICE_TYPE; }
EXPORT int32_t aoti_torch_dtype_float32() { return F32; }
EXPORT int32_t aoti_torch_dtype_float64() { return F64; }
EXPORT int32_t aoti_torch_dtype_float16() { return F16; }
EXPORT int32_t aoti_torch_dtype_bfloat16() { return BF16; }

EXPORT AOTITorchError aoti_torch_create_cuda_guard(int32_t device, CUDAGuardHandle *out) {
  ENTER
  REQUIRE(device >= 0 && device < EMULATED_DEVICES);
  *out = (CUDAGuardHandle) new guard(device);
  return AOTI_TORCH_SUCCESS;
}
EXPORT AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle handle) {
  delete (guard *)handle;
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **out) {
  ENTER
  REQUIRE(device >= 0 && device < EMULATED_DEVICES);
  *out = emulated_used(device);
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_create_tensor_from_blob(void *data, int64_t rank,
                                                         const int64_t *dims,
                                                         const int64_t *strides, int64_t offset,
                                                         int32_t dtype, int32_t device_type,
                                                         int32_t device, AtenTensorHandle *out) {
  ENTER
  const tensor t = {
      (char *)data, numbers(dims, dims + rank), numbers(strides, strides + rank), dtype, device,
      false};
  REQUIRE(device_type == DEVICE_TYPE && device == emulated_device() && offset == 0);
  REQUIRE(dtype == F32 || dtype == F64 || dtype == F16 || dtype == BF16);
  REQUIRE(extent_of(t) == 0 || emulated_is_out(data, (size_t)extent_of(t)));
  *out = added(t);
  return AOTI_TORCH_SUCCESS;
}
EXPORT AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  REQUIRE(is_out(handle));
  const std::unique_ptr<tensor> t((tensor *)handle);
  if (t->owned) aoti_torch_cuda_caching_allocator_raw_delete(t->data);
  const std::lock_guard<std::mutex> lock(mutex);
  tensors.erase(t.get());
  return AOTI_TORCH_SUCCESS;
}
EXPORT AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle handle, void **out) {
  ENTER
  REQUIRE(is_out(handle));
  *out = ((tensor *)handle)->data;
  return AOTI_TORCH_SUCCESS;
}
EXPORT AOTITorchError aoti_torch_get_strides(AtenTensorHandle handle, int64_t **out) {
  ENTER
  REQUIRE(is_out(handle));
  *out = ((tensor *)handle)->strides.data();
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_cuda_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle *bias, const int64_t *stride,
    int64_t n_stride, const int64_t *padding, int64_t n_padding, const int64_t *dilation,
    int64_t n_dilation, int32_t transposed, const int64_t *output_padding, int64_t n_output_padding,
    int64_t groups, AtenTensorHandle *out) {
  ENTER
  REQUIRE(is_out(input) && is_out(weight) && (!bias || is_out(*bias)));
  REQUIRE(!casts());
  const tensor &x = *(tensor *)input, &w = *(tensor *)weight;
  const windows by = {numbers(stride, stride + n_stride),
                      numbers(padding, padding + n_padding),
                      numbers(dilation, dilation + n_dilation),
                      numbers(output_padding, output_padding + n_output_padding),
                      transposed,
                      groups};
  REQUIRE(is_for(by, x));
  job *const j = new job{{x, w}, bias != nullptr, by, {}, {}};
  if (bias) j->given.push_back(*(tensor *)*bias);
  return give(j, dims_of(x, w, by), out);
}

EXPORT AOTITorchError aoti_torch_cuda_convolution_backward(
    AtenTensorHandle grad_output, AtenTensorHandle input, AtenTensorHandle weight,
    const int64_t **bias_dims, int64_t n_bias_dims, const int64_t *stride, int64_t n_stride,
    const int64_t *padding, int64_t n_padding, const int64_t *dilation, int64_t n_dilation,
    int32_t transposed, const int64_t *output_padding, int64_t n_output_padding, int64_t groups,
    const int32_t *wanted, int64_t n_wanted, AtenTensorHandle *grad_input,
    AtenTensorHandle *grad_weight, AtenTensorHandle *grad_bias) {
  ENTER
  REQUIRE(is_out(grad_output) && is_out(input) && is_out(weight));
  REQUIRE(!casts());
  REQUIRE(!bias_dims && n_bias_dims == 0 && !transposed && n_wanted == 3);
  REQUIRE(wanted[0] + wanted[1] == 1 && !wanted[2] && !grad_bias);
  REQUIRE(!grad_input == !wanted[0] && !grad_weight == !wanted[1]);
  const tensor &dy = *(tensor *)grad_output, &x = *(tensor *)input, &w = *(tensor *)weight;
  const windows by = {numbers(stride, stride + n_stride),
                      numbers(padding, padding + n_padding),
                      numbers(dilation, dilation + n_dilation),
                      numbers(output_padding, output_padding + n_output_padding),
                      transposed,
                      groups};
  REQUIRE(is_for(by, x) && dims_of(x, w, by) == dy.dims);
  job *const j = new job{{dy, x, w}, false, by, {wanted, wanted + 3}, {}};
  return wanted[0] ? give(j, x.dims, grad_input) : give(j, w.dims, grad_weight);
}

/* ---- what tests ask ---- */

EXPORT int64_t emulated_tensors(void) {
  const std::lock_guard<std::mutex> lock(mutex);
  return (int64_t)tensors.size();
}
EXPORT void emulated_channels_last(int on) { channels_last = on; }
