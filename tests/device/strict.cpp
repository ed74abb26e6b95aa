// A device for tests on which a missing wait shows as wrong data: ``sim:0`` and ``sim:1``. `strict.py` compiles it.
//
// Its rules are those of CUDA, as strict as they may be:
// - Each stream is a thread. Work on it runs later, after delays that a test chooses.
// - The host cannot read or write device memory: its addresses are mapped without access. The threads use a second range.
// - Device memory is filled with 0xDB when it is freed, in the order of the stream that it was allocated on. So other
//   streams that still use it read wrong data, unless `record_stream` named them.
// - A copy from or to pinned memory reads or writes the host when the stream gets there. A copy from pageable memory
//   waits for the stream's earlier work, then copies the source; a copy to pageable memory waits until it is complete.
// - torch's own caching allocator manages pinned memory.
// - While a stream is captured (from torch 2.13), its work is recorded and does not run. To wait for that stream, to record
//   an event there, and to ask for an event or for new pinned memory in that thread, is an error that ends the capture.
//   The memory that is allocated in a capture belongs to the graph for good.
//
// What only a GPU can show about captures: copies of pageable memory in a capture, which are an error here; what another
// thread may do in the meantime; and the private pools of the allocator.
//
// The operators for views run torch's CPU functions for sizes and strides. Operators that write into existing tensors
// run on the stream. All others wait for the stream.

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#if __has_include(<ATen/core/GraphImplInterface.h>)  // from torch 2.13
#define HAS_GRAPHS
#include <ATen/core/GraphImplInterface.h>
#endif
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <random>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int STREAMS = 32;  // of the pool of each device, given out in turn, as torch does on CUDA
constexpr size_t ARENA = size_t(16) << 30;  // of addresses
constexpr unsigned char POISON = 0xDB;

std::atomic<bool> forked{false};
std::atomic<int64_t> shortest_us{0}, longest_us{0};  // the delay before each piece of work

enum Count { H2D, D2H, D2D, H2D_BYTES, D2H_BYTES, WAITS, EVENT_WAITS, PINNED, PINNED_PEAK, PINNED_CALLS, COUNTS };
std::array<std::atomic<int64_t>, COUNTS> counts{};

void check_alive() {
  TORCH_CHECK(!forked, "Cannot re-initialize sim in forked subprocess");
}

// ---------------------------------------------------------------------------------------------------- streams, events

struct Done {  // what an event waits for
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, late = false;
  std::chrono::steady_clock::time_point at;

  bool query() {
    std::lock_guard lock(mutex);
    return done;
  }
  void set() {
    std::lock_guard lock(mutex);
    done = true;
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};
using Marker = std::shared_ptr<Done>;
using Work = std::function<void()>;

struct Capture {  // what a graph records
  int64_t number = 0;
  std::vector<Work> work;
  bool valid = true;

  [[noreturn]] void refuse(const char* what) {
    valid = false;
    TORCH_CHECK(false, "sim: ", what, " is not permitted when a stream is capturing");
  }
};
thread_local Capture* captured_here = nullptr;  // by this thread

class Worker {  // one stream
 public:
  std::atomic<Capture*> capture{nullptr};

  void put(Work work) {
    if (auto* into = capture.load()) {
      into->work.push_back(std::move(work));
    } else {
      run_later(std::move(work));
    }
  }
  void run_later(Work work) {  // also while the stream is captured
    check_alive();
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  Marker mark() {
    if (auto* into = capture.load()) into->refuse("to wait for a stream, or for an event there,");
    auto marker = std::make_shared<Done>();
    if (idle()) {
      marker->set();
    } else {
      put([marker] { marker->set(); });
    }
    return marker;
  }
  Marker mark_when_freed() {  // never done if the stream is captured: the graph may read the memory at any time
    return forked || capture.load() ? std::make_shared<Done>() : mark();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return work_.empty() && !running_;
  }
  void wait() {
    check_alive();
    mark()->wait();
  }

 private:
  void run() {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
    while (true) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        running_ = false;
        changed_.wait(lock, [this] { return !work_.empty(); });
        running_ = true;
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (int64_t from = shortest_us, to = longest_us; to > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(from + int64_t(random() % uint64_t(to - from + 1))));
      }
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  bool started_ = false, running_ = false;
};

// Leaked on purpose: the threads use them until the process ends.
auto& workers = *new std::array<std::array<Worker, STREAMS + 1>, DEVICES>();
thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, DEVICES> current_stream{};
std::atomic<int> next_stream{0};

Worker& worker(const c10::Stream& stream) {
  return workers.at(stream.device_index()).at(stream.id());
}
c10::Stream stream_of(DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, device), current_stream.at(device));
}
Worker& current(DeviceIndex device) {
  return worker(stream_of(device));
}
void host_waits(Worker& on) {
  counts[WAITS]++;
  on.wait();
}
// ---------------------------------------------------------------------------------------------------- device memory

struct Block {
  char* address;
  size_t size, asked;
  DeviceIndex device;
  Worker* stream;
  int64_t graph;  // the number of the capture that allocated it, or 0
  std::set<Worker*> used_by;
};

struct Memory {  // of one device
  char* visible = map(PROT_NONE);  // the addresses of its tensors
  char* real = map(PROT_READ | PROT_WRITE);  // where the threads read and write
  size_t end = 0;
  int64_t allocated = 0, limit = -1;
  std::mutex mutex;
  std::map<std::tuple<Worker*, int64_t, size_t>, std::vector<Block*>> unused;
  std::vector<std::pair<Block*, std::vector<Marker>>> waiting;

  static char* map(int access) {
    void* at = mmap(nullptr, ARENA, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no addresses for device memory");
    return static_cast<char*>(at);
  }
  bool owns(const void* address) const {
    return address >= visible && address < visible + ARENA;
  }
  void recycle(Block* block) {
    char* at = real + (block->address - visible);
    Work poison = [at, size = block->size] { std::memset(at, POISON, size); };
    if (block->graph == 0) {
      block->stream->run_later(poison);
    } else if (auto* capture = block->stream->capture.load(); capture && capture->number == block->graph) {
      block->stream->put(poison);
    }
    unused[{block->stream, block->graph, block->size}].push_back(block);
  }
  Block* take(DeviceIndex device, size_t asked) {
    std::lock_guard lock(mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, limit < 0 || allocated + int64_t(asked) <= limit,
                     "sim out of memory. Tried to allocate ", asked, " bytes.");
    std::erase_if(waiting, [this](auto& entry) {
      auto& [block, markers] = entry;
      if (!std::all_of(markers.begin(), markers.end(), [](auto& marker) { return marker->query(); })) return false;
      recycle(block);
      return true;
    });
    Worker* stream = &current(device);
    auto* capture = stream->capture.load();
    int64_t graph = capture ? capture->number : 0;
    size_t size = (asked + 511) / 512 * 512;
    allocated += asked;
    auto& same = unused[{stream, graph, size}];
    if (!same.empty()) {
      Block* block = same.back();
      same.pop_back();
      block->asked = asked;
      return block;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, end + size <= ARENA, "sim out of addresses");
    Block* block = new Block{visible + end, size, asked, device, stream, graph, {}};
    end += size;
    std::memset(real + (block->address - visible), POISON, size);
    return block;
  }
  void give_back(Block* block) {
    std::lock_guard lock(mutex);
    allocated -= block->asked;
    if (forked) return;
    block->used_by.erase(block->stream);
    if (block->used_by.empty()) return recycle(block);
    std::vector<Marker> markers;
    for (Worker* other : block->used_by) markers.push_back(other->mark_when_freed());
    block->used_by.clear();
    waiting.emplace_back(block, std::move(markers));
  }
};
auto& memories = *new std::array<Memory, DEVICES>();

// The address where the threads find what a device tensor holds.
char* real_address(const void* address) {
  for (auto& memory : memories) {
    if (memory.owns(address)) return memory.real + (static_cast<const char*>(address) - memory.visible);
  }
  return const_cast<char*>(static_cast<const char*>(address));
}

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memories[block->device].give_back(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    check_alive();
    Device device(TYPE, current_device);
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    Block* block = memories[current_device].take(current_device, size);
    return {block->address, block, &delete_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "sim copies through tensors only");
  }
};
DeviceAllocator device_allocator;

void record_data(const c10::DataPtr& data, const c10::Stream& stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block == nullptr || !memories[block->device].owns(data.get())) return;
  std::lock_guard lock(memories[block->device].mutex);
  block->used_by.insert(&worker(stream));
}

// ---------------------------------------------------------------------------------------------------- pinned memory

std::mutex pinned_mutex;
auto& pinned = *new std::map<char*, size_t>();
bool cannot_pin = false;

bool is_pinned(const void* address) {
  std::lock_guard lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == pinned.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return address < start + size;
}

struct PinnedMemory : at::CachingHostAllocatorImpl<c10::Stream, Marker> {
  void allocate_host_memory(size_t size, void** address) override {
    check_alive();
    if (captured_here) captured_here->refuse("to pin memory");
    std::lock_guard lock(pinned_mutex);
    TORCH_CHECK(!cannot_pin, "sim: no more memory can be pinned");
    *address = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    pinned[static_cast<char*>(*address)] = size;
    counts[PINNED_CALLS]++;
    counts[PINNED_PEAK] = std::max(counts[PINNED_PEAK].load(), counts[PINNED] += size);
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    std::lock_guard lock(pinned_mutex);
    pinned.erase(static_cast<char*>(block->ptr_));
    counts[PINNED] -= block->size_;
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<Marker>>& events, c10::Stream stream) override {
    events->push_back(worker(stream).mark_when_freed());
  }
  bool query_event(Marker& event) override {
    return event->query();
  }
  c10::Stream get_current_stream() const override {
    return stream_of(current_device);
  }
  bool stream_is_capturing(c10::Stream stream) const override {
    return worker(stream).capture.load() != nullptr;
  }
};
void free_pinned(void* context);
struct PinnedAllocator final : at::CachingHostAllocatorInterface<PinnedMemory, free_pinned> {};
auto& pinned_allocator = *new PinnedAllocator();
void free_pinned(void* context) {
  pinned_allocator.free(context);
}
REGISTER_HOST_ALLOCATOR(TYPE, &pinned_allocator)

// ---------------------------------------------------------------------------------------------------- what torch asks

struct Event {
  Marker marker;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  Device exchangeDevice(Device device) const override {
    Device before(TYPE, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {TYPE, current_device};
  }
  void setDevice(Device device) const override {
    check_alive();
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < DEVICES, "sim has no device ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(Device device) const override {
    check_alive();
    return stream_of(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    check_alive();
    Device with_index(TYPE, device.has_index() ? device.index() : current_device);
    return c10::Stream(c10::Stream::UNSAFE, with_index, 1 + next_stream++ % STREAMS);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(stream.device_index());
    current_stream.at(stream.device_index()) = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return worker(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(worker(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    for (auto& each : workers.at(device)) each.wait();
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->marker = worker(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || static_cast<Event*>(event)->marker->query()) return;
    worker(stream).put([marker = static_cast<Event*>(event)->marker] { marker->wait(); });
  }
#ifdef HAS_GRAPHS
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return worker(stream).capture.load() != nullptr;
  }
#endif
  bool queryEvent(void* event) const override {
    if (captured_here) captured_here->refuse("to ask for an event");
    return event == nullptr || static_cast<Event*>(event)->marker->query();
  }
  void synchronizeEvent(void* event) const override {
    check_alive();
    if (captured_here) captured_here->refuse("to wait for an event");
    counts[EVENT_WAITS]++;
    if (event != nullptr) static_cast<Event*>(event)->marker->wait();
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    Marker first = static_cast<Event*>(begin)->marker, last = static_cast<Event*>(end)->marker;
    TORCH_CHECK(first->query() && last->query(), "sim: the time between events that are not over");
    return std::chrono::duration<double, std::milli>(last->at - first->at).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_data(data, stream);
  }
};
c10::impl::DeviceGuardImplRegistrar register_guard(TYPE, new Guard());

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return !forked;
  }
  void init() const override {
    check_alive();
  }
  DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice({TYPE, device});
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : Guard().exchangeDevice({TYPE, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  Device getDeviceFromPtr(void* data) const override {
    return {TYPE, DeviceIndex(memories[1].owns(data))};
  }
};
bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

// ---------------------------------------------------------------------------------------------------- graphs

#ifdef HAS_GRAPHS
class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}
  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode) override {
    auto stream = stream_of(current_device);
    TORCH_CHECK(stream.id() != 0, "sim captures no work of the default stream: use a stream of your own");
    TORCH_CHECK(!captured_here && recorded_.work.empty(), "sim: one capture at a time in a thread and in a graph");
    static std::atomic<int64_t> captures{0};
    recorded_.number = ++captures;
    recorded_.valid = true;
    worker_ = &worker(stream);
    worker_->capture = captured_here = &recorded_;
  }
  void capture_end() override {
    worker_->capture = captured_here = nullptr;
    if (recorded_.valid) return;
    reset();
    TORCH_CHECK(false, "sim: the capture ended with an error before");
  }
  void replay() override {
    for (auto& each : recorded_.work) current(current_device).put(each);
  }
  void reset() override {
    recorded_.work.clear();
  }
  c10::MempoolId_t pool() const override {
    return {0, recorded_.number};
  }
  void instantiate() override {}
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Capture recorded_;
  Worker* worker_ = nullptr;
};
#endif

// ---------------------------------------------------------------------------------------------------- operators

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A CPU tensor over the memory that the threads use. It does not keep the memory alive.
at::Tensor real_tensor(const at::Tensor& t) {
  if (!t.is_privateuseone()) return t;
  auto real = at::from_blob(t.numel() ? real_address(t.data_ptr()) : nullptr, t.sizes(), t.strides(), t.options().device(at::kCPU));
  if (t.is_conj()) real._set_conj(true);
  if (t.is_neg()) real._set_neg(true);
  return real;
}

void on_stream(Worker& stream, at::Tensor to, at::Tensor from) {
  stream.put([to, from]() mutable { to.copy_(from); });
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool to_device = to.is_privateuseone();
  auto stream = stream_of((to_device ? to : from).device().index());
  auto& thread = worker(stream);
  const at::Tensor& on_host = to_device ? from : to;
  size_t nbytes = to.nbytes();
  char* target = real_address(to.data_ptr());
  char* source = real_address(from.data_ptr());
  bool late = is_pinned(on_host.data_ptr());
  counts[to_device ? H2D : D2H]++;
  counts[to_device ? H2D_BYTES : D2H_BYTES] += nbytes;
  if (to_device && !late) {
    host_waits(thread);
    std::vector<char> staged(source, source + nbytes);
    thread.put([target, staged = std::move(staged)] { std::memcpy(target, staged.data(), staged.size()); });
    return;
  }
  thread.put([target, source, nbytes] { std::memcpy(target, source, nbytes); });
  if (!late || !non_blocking) return host_waits(thread);
  pinned_allocator.record_event(on_host.data_ptr(), on_host.storage().data_ptr().get_context(), stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto source = from.expand_as(to);
  if (from.is_privateuseone() && to.is_privateuseone()) {
    counts[D2D]++;
    auto &here = current(from.device().index()), &there = current(to.device().index());
    bool apart = &here != &there;
    if (apart) here.put([marker = there.mark()] { marker->wait(); });
    on_stream(here, real_tensor(to), real_tensor(source));
    if (apart) there.put([marker = here.mark()] { marker->wait(); });
    return to;
  }
  bool plain = source.dtype() == to.dtype() && source.is_contiguous() && to.is_contiguous() &&
      source.is_conj() == to.is_conj() && source.is_neg() == to.is_neg();
  if (plain) {
    copy_bytes(source, to, non_blocking);
    return to;
  }
  // As on CUDA, a cast is made on the device if nobody waits, else on the host.
  bool cast_there = non_blocking == to.is_privateuseone();
  auto dtype = cast_there ? source.scalar_type() : to.scalar_type();
  auto bytes = source.resolve_conj().resolve_neg().to(dtype).contiguous();
  if (to.scalar_type() == dtype && to.is_contiguous()) {
    copy_bytes(bytes, to, non_blocking);
  } else {
    auto arrived = at::empty(to.sizes(), to.options().dtype(dtype));
    copy_bytes(bytes, arrived, non_blocking);
    const_cast<at::Tensor&>(to).copy_(arrived, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_data(self.storage().data_ptr(), stream);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  auto nbytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    impl->unsafe_storage().set_data_ptr_noswap(device_allocator.allocate(nbytes));
    impl->unsafe_storage().set_nbytes(nbytes);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

void on_cpu(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

template <class F>
void each_tensor(c10::IValue& value, const F& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorList().vec()) list.push_back(change(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorList().vec()) list.push_back(t ? std::optional(change(*t)) : t);
    value = list;
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  Stack given(arguments.begin(), arguments.end()), work = given;
  auto written = [](const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); };
  bool waits = !std::all_of(schema.returns().begin(), schema.returns().end(), written);
  std::optional<Device> device;
  std::map<c10::TensorImpl*, at::Tensor> originals;
  for (size_t i = 0; i < work.size(); i++) {
    // The operator chooses the size of an empty result.
    bool grows = written(schema.arguments()[i]) && work[i].isTensor() && work[i].toTensor().numel() == 0;
    waits |= grows;
    each_tensor(work[i], [&](const at::Tensor& t) {
      if (!t.is_privateuseone()) return t.clone();  // as on CUDA, a number on the host is read at the call
      device = t.device();
      auto real = grows ? at::empty({0}, t.options().device(at::kCPU)) : real_tensor(t);
      originals[real.unsafeGetTensorImpl()] = t;
      return real;
    });
    if (work[i].isDevice()) work[i] = Device(at::kCPU);
  }
  torch::jit::drop(*stack, schema.arguments().size());
  TORCH_CHECK(device, schema.name(), " has no tensor on sim");
  c10::DeviceGuard guard(*device);
  auto& stream = current(device->index());
  if (!waits) {
    stream.put([op, work] {
      auto arguments = work;  // the operator takes them, and a graph needs them again
      op.callBoxed(&arguments);
    });
    for (size_t i = 0; !schema.returns().empty() && i < given.size(); i++) {
      if (written(schema.arguments()[i])) stack->push_back(given[i]);
    }
    return;
  }
  host_waits(stream);
  op.callBoxed(&work);
  auto fill = [&](at::Tensor made, const at::Tensor& t) {
    host_waits(stream);  // the poison of the block may be on its way
    if (t.numel()) real_tensor(made).copy_(t);
    return made;
  };
  for (auto& value : work) {
    each_tensor(value, [&](const at::Tensor& t) -> at::Tensor {
      auto known = originals.find(t.unsafeGetTensorImpl());
      if (known == originals.end()) return fill(at::empty_strided(t.sizes(), t.strides(), t.options().device(*device)), t);
      return known->second.sizes() == t.sizes() ? known->second : fill(known->second.resize_(t.sizes()), t);
    });
    stack->push_back(value);
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize);
  for (auto name : {"view", "as_strided", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_",
                    "set_.source_Storage", "_reshape_alias", "unfold"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// ---------------------------------------------------------------------------------------------------- what tests ask

std::mutex gates_mutex;
auto& gates = *new std::vector<Marker>();

TORCH_LIBRARY(strict, m) {
  m.def("busy(float seconds, Device device) -> ()", [](double seconds, Device device) {
    current(device.has_index() ? device.index() : current_device).put([seconds] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    });
  });
  // Stop the current stream until it is released, or for so many seconds. Returns a number for `release`.
  m.def("hold(float seconds, Device device) -> int", [](double seconds, Device device) {
    auto gate = std::make_shared<Done>();
    current(device.has_index() ? device.index() : current_device).put([gate, seconds] {
      std::unique_lock lock(gate->mutex);
      gate->changed.wait_for(lock, std::chrono::duration<double>(seconds), [gate] { return gate->done; });
      gate->late = !gate->done;
    });
    std::lock_guard lock(gates_mutex);
    gates.push_back(gate);
    return int64_t(gates.size()) - 1;
  });
  // False if the stream went on by itself before.
  m.def("release(int gate) -> bool", [](int64_t number) {
    std::lock_guard lock(gates_mutex);
    gates.at(number)->set();
    std::lock_guard late(gates.at(number)->mutex);
    return !gates.at(number)->late;
  });
  m.def("delays(int shortest_us, int longest_us) -> ()", [](int64_t from, int64_t to) {
    shortest_us = from;
    longest_us = to;
  });
  m.def("counts() -> int[]", []() { return std::vector<int64_t>(counts.begin(), counts.end()); });
  m.def("reset_counts() -> ()", []() {
    for (int i = 0; i < PINNED; i++) counts[i] = 0;
    counts[PINNED_PEAK] = counts[PINNED].load();
    counts[PINNED_CALLS] = 0;
  });
  m.def("allocated(int device) -> int", [](int64_t device) { return memories.at(device).allocated; });
  m.def("limit(int device, int nbytes) -> ()", [](int64_t device, int64_t nbytes) {
    memories.at(device).limit = nbytes < 0 ? -1 : memories.at(device).allocated + nbytes;
  });
  m.def("pinning(bool works) -> ()", [](bool works) { cannot_pin = !works; });
  m.def("free_pinned() -> ()", []() { pinned_allocator.empty_cache(); });
}

}  // namespace

#ifdef HAS_GRAPHS
namespace at {
REGISTER_GRAPH_IMPL(SIM, Graph)
}  // namespace at
#endif
