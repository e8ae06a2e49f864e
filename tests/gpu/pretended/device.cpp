// A device named "pretend" whose memory is the host's: for finding, without a GPU, tensors on the wrong device and
// places where the host waits for the device. Every operation runs on the CPU, on the same memory.
//
// Source: https://docs.pytorch.org/docs/stable/accelerator/index.html (PrivateUse1, the dispatch key for new devices).

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <set>

namespace {

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kPretend, 0);
std::atomic<bool> waiting_is_an_error{false};

void wait_for_device(const char* why) {
  TORCH_CHECK(!waiting_is_an_error, "called a synchronizing operation: ", why);
}

// There is one device with one stream, which is always done with its work.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kPretend;
  c10::DeviceType type() const override { return kPretend; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}  // as CUDA's debug mode, which lets it pass
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("a stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device("the device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

void free_memory(void* memory) { free(memory); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&memory, 64, size) == 0, "pretend out of memory");
    return {memory, memory, &free_memory, kDevice};
  }
  void copy_data(void* target, const void* source, std::size_t size) const override { memcpy(target, source, size); }
};

Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
};

Hooks hooks;

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.device() != target.device() && !non_blocking && source.numel()) {
    wait_for_device(source.is_cpu() ? "a copy to the device" : "a copy to the host");
  }
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  on_host(target).copy_(on_host(source));
  return target;
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  wait_for_device("item()");
  return on_host(tensor).item();
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset, size, stride);
}

const std::set<std::string> kWaiting = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"};

// Runs an operation on the CPU. A tensor of the host among those of the device is an error, unless it is a number.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool has_device = false, has_host = false;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    has_device |= tensor.device() == kDevice;
    has_host |= tensor.is_cpu() && tensor.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    if (value.isList() && !value.isTensorList()) {
      for (const auto& entry : value.toListRef()) if (entry.isTensor()) look(entry.toTensor());
    }
  }
  const auto& name = op.schema().name();
  TORCH_CHECK(!(has_device && has_host), name, ": expected all tensors to be on the same device");
  if (kWaiting.count(name)) wait_for_device(name.c_str());
  struct Unwatched {  // the copies to the host and back are the fallback's, not the program's
    bool before = waiting_is_an_error.exchange(false);
    ~Unwatched() { waiting_is_an_error = before; }
  } unwatched;
  at::native::cpu_fallback(op, stack);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kPretend, &memory);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_scalar);
  library.impl("as_strided", &as_strided);
  library.impl("resize_", &resize);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  module.def("forbid_waits", [](bool is_forbidden) { waiting_is_an_error = is_forbidden; });
}
