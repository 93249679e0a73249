/* A stand-in for what tells PyTorch of the devices of CUDA, so that autograd runs on them: with it
 * a PyTorch without CUDA has tensors there, see tests/device/emulated_cuda.py. PyTorch's own work
 * is done when a call returns, whatever stream it is in. */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "emulated.h"

namespace {

struct hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return emulated_is_retained(device);
  }
  c10::DeviceIndex deviceCount() const override { return EMULATED_DEVICES; }
};
static_assert(sizeof(hooks) == sizeof(at::CUDAHooksInterface), "one has room for the other");

/* PyTorch has looked for them when it was imported, and keeps what it found. */
[[maybe_unused]] const auto *const in_their_place = new ((void *)&at::detail::getCUDAHooks()) hooks;

struct devices final : c10::impl::DeviceGuardImplInterface {
  static c10::Device numbered(int device) {
    return {c10::DeviceType::CUDA, (c10::DeviceIndex)device};
  }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return EMULATED_DEVICES; }
  c10::Device getDevice() const override { return numbered(emulated_current_device()); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return numbered(emulated_exchange_device(d.index()));
  }
  void setDevice(c10::Device d) const override { emulated_exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    emulated_restore_device(d.index());
  }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  void *getStreamNativeHandle(const c10::Stream s) const override {
    return emulated_used(s.device_index());
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  void record(void **, const c10::Stream &, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void *, const c10::Stream &) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, devices)

}  // namespace
