#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mindspeed {
namespace {

// Smaller results are malloc's, which keeps them itself.
constexpr size_t kSmallest = size_t{1} << 20;
constexpr size_t kStep = size_t{1} << 16;
constexpr size_t kLargestOffset = 4096;

// Bytes that are kept at most while nobody uses them: MINDSPEED_KEPT_MEMORY in MiB.
size_t limit() {
  static const size_t bytes = [] {
    const char *given = std::getenv("MINDSPEED_KEPT_MEMORY");
    return (given ? std::strtoull(given, nullptr, 10) : 256) << 20;
  }();
  return bytes;
}

// Memory, and the bytes of it from `data` on.
struct Block {
  void *memory;
  char *data;
  size_t bytes;
};

// Blocks begin at different lines of a page: rows of several tensors that lie alike would be after the same few lines of
// the first cache, of which there are as many as a kernel reads streams.
size_t next_offset() {
  constexpr size_t lines = 9, many = 7;
  static std::atomic<size_t> made{0};
  return made++ % many * lines * 64;
}

Block make(size_t bytes) {
  const size_t whole = (bytes + kLargestOffset + kStep - 1) / kStep * kStep, offset = next_offset();
  void *memory = nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&memory, bytes >= kHugePage ? kHugePage : kStep, whole) == 0,
                   "no memory for a result of ", bytes, " bytes");
  prefer_huge_pages(memory, static_cast<int64_t>(whole));
  return {memory, static_cast<char *>(memory) + offset, whole - offset};
}

// Blocks that nobody uses, the one used last at the end. Whoever cannot look at once does without: a process that was
// forked while another thread looked will never be able to.
class Stock {
public:
  // A block of at least this size, at most an eighth larger.
  Block take(size_t bytes) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {
      for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block)
        if (block->bytes >= bytes && block->bytes - bytes <= std::max(bytes / 8, 2 * kStep)) {
          const Block found = *block;
          blocks_.erase(std::next(block).base());
          bytes_ -= found.bytes;
          return found;
        }
    }
    return make(bytes);
  }

  void give(Block block) {
    std::vector<Block> surplus;
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock && block.bytes <= limit()) {
      blocks_.push_back(block);
      bytes_ += block.bytes;
      auto kept = blocks_.begin();
      for (; bytes_ > limit(); ++kept)
        bytes_ -= kept->bytes;
      surplus.assign(blocks_.begin(), kept);
      blocks_.erase(blocks_.begin(), kept);
    } else {
      surplus.push_back(block);
    }
    for (const Block &one : surplus)
      std::free(one.memory);
  }

private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t bytes_ = 0;
};

// It outlives every tensor.
Stock &stock() {
  static Stock &one = *new Stock;
  return one;
}

class Results final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    auto *block = new Block(stock().take(bytes));
    c10::profiledCPUMemoryReporter().New(block->data, bytes);
    return {block->data, block, give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }

private:
  static void give_back(void *context) {
    auto *block = static_cast<Block *>(context);
    c10::profiledCPUMemoryReporter().Delete(block->data);
    stock().give(*block);
    delete block;
  }
};

Results results;

} // namespace

void prefer_huge_pages(const void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const int64_t begin = reinterpret_cast<int64_t>(memory);
  const int64_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + bytes) / kHugePage * kHugePage;
  if (last > first)
    madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

int64_t last_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t kib = 0;
    if (std::FILE *file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kib) != 1)
        kib = 0;
      std::fclose(file);
    }
    return kib > 0 ? kib << 10 : int64_t{32} << 20;
  }();
  return bytes;
}

at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions &options) {
  const auto type = c10::typeMetaToScalarType(options.dtype());
  const size_t count = std::accumulate(sizes.begin(), sizes.end(), size_t{1}, std::multiplies<>());
  if (count * c10::elementSize(type) < kSmallest)
    return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &results, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

} // namespace mindspeed
