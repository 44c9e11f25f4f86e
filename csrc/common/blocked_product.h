// Products C = A B of many small matrices on all threads: panels packed into the cache, a register tile, a finish.
//
// Every product is cut into blocks of rows and columns; threads take blocks from one queue, the largest products first, so
// that a few crowded groups do not leave threads idle. Within a block the sum is cut so that both packed blocks stay in the
// second-level cache; partial sums stay 32 bits wide and are finished (scaled, added, rounded) once. A finish that adds to
// sums which lie in memory is called for every part: then the rows of a part stay packed for all columns of a strip.
#pragma once

#include "memory.h"
#include "panels.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

namespace mindspeed {

constexpr int kTileRows = 8;
constexpr int kTileColumns = 48;
constexpr int kTileVectors = kTileColumns / 16;
constexpr int kTileWords = kTileRows * kTileColumns;
constexpr int64_t kBlockRows = 256;
constexpr int64_t kBlockColumns = 192;
constexpr int64_t kBlockSteps = 512;
constexpr int64_t kRowStep = 16; // so many packed rows end at a cache line, however long the sum

// How a product is cut: the sum into `parts` of `steps` words, and the rows. Where the sum is short more rows fit.
struct Cut {
  int64_t parts, steps, rows;

  Cut(const Product &product, int64_t per_word) {
    const int64_t words = (product.inner + per_word - 1) / per_word;
    parts = std::max<int64_t>(1, (words + kBlockSteps - 1) / kBlockSteps);
    steps = (words + parts - 1) / parts;
    const int64_t fit = kBlockRows * kBlockSteps / std::max<int64_t>(steps, 1) / kRowStep * kRowStep;
    static_assert(kRowStep % kTileRows == 0 && kBlockRows % kRowStep == 0, "packed columns begin where packed rows end");
    rows = parts > 1 ? kBlockRows : std::clamp(fit, kBlockRows, 2 * kBlockRows);
  }
};

// A part of one product that one thread computes: a block of rows, and of columns one or several blocks.
struct Strip {
  int64_t product, row, column, end;
};

// Memory of a thread that lives as long as the thread: packed blocks and partial sums.
class Scratch {
public:
  uint32_t *words(int64_t count) {
    if (count > held_) {
      const int64_t bytes = (count * 4 + kHugePage - 1) / kHugePage * kHugePage;
      words_.reset(static_cast<uint32_t *>(std::aligned_alloc(kHugePage, bytes)));
      held_ = words_ ? count : 0;
      if (!words_)
        throw std::bad_alloc();
      prefer_huge_pages(words_.get(), bytes);
    }
    return words_.get();
  }

private:
  struct Free {
    void operator()(void *words) const { std::free(words); }
  };
  std::unique_ptr<uint32_t, Free> words_;
  int64_t held_ = 0;
};

// One for all types of products.
inline Scratch &scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

struct FloatDot {
  using Sum = __m512;
  static Sum load(const uint32_t *from) { return _mm512_load_ps(from); }
  static void store(uint32_t *to, Sum sum) { _mm512_store_ps(to, sum); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static void start(const uint32_t *, int64_t, uint32_t *start) { std::memset(start, 0, kTileColumns * 4); }
};

// One fp32 number per word.
struct SingleDot : FloatDot {
  static Sum dot(Sum sum, uint32_t a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(a))), _mm512_castsi512_ps(b), sum);
  }
};

#if defined(__AVX512BF16__)
// Two bf16 numbers per word, summed in fp32.
struct PairDot : FloatDot {
  static Sum dot(Sum sum, uint32_t a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
};
#endif

#if defined(__AVX512VNNI__)
// Four numbers per word, unsigned (128 too much) times signed: sums start at -128 times the sum of each column.
struct QuadDot {
  using Sum = __m512i;
  static Sum load(const uint32_t *from) { return _mm512_load_si512(from); }
  static void store(uint32_t *to, Sum sum) { _mm512_store_si512(to, sum); }
  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Sum dot(Sum sum, uint32_t a, __m512i b) {
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(static_cast<int>(a)), b);
  }
  static void start(const uint32_t *panel, int64_t steps, uint32_t *start) {
    for (int v = 0; v < kTileVectors; ++v) {
      Sum sum = _mm512_setzero_si512();
      for (int64_t step = 0; step < steps; ++step)
        sum = dot(sum, 0x80808080u, _mm512_load_si512(panel + step * kTileColumns + 16 * v));
      store(start + 16 * v, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
  }
};
#endif

// One register tile: `Rows` rows of a panel of A times `16 Vectors` columns of a panel of B.
template <class Dot, int Rows, int Vectors>
void multiply_tile(int64_t steps, const uint32_t *a, const uint32_t *b, const uint32_t *start, uint32_t *tile) {
  typename Dot::Sum sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      sums[r][v] = Dot::load(start + 16 * v);
  for (int64_t step = 0; step < steps; ++step, a += kTileRows, b += kTileColumns) {
    __m512i columns[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      columns[v] = _mm512_load_si512(b + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        sums[r][v] = Dot::dot(sums[r][v], a[r], columns[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      Dot::store(tile + r * kTileColumns + 16 * v, sums[r][v]);
}

using TileKernel = void (*)(int64_t, const uint32_t *, const uint32_t *, const uint32_t *, uint32_t *);

template <class Dot, int Vectors> TileKernel kernel_of_rows(int64_t rows) {
  static const TileKernel kernels[kTileRows] = {
      multiply_tile<Dot, 1, Vectors>, multiply_tile<Dot, 2, Vectors>, multiply_tile<Dot, 3, Vectors>,
      multiply_tile<Dot, 4, Vectors>, multiply_tile<Dot, 5, Vectors>, multiply_tile<Dot, 6, Vectors>,
      multiply_tile<Dot, 7, Vectors>, multiply_tile<Dot, 8, Vectors>};
  return kernels[rows - 1];
}

template <class Dot> TileKernel tile_kernel(int64_t rows, int64_t columns) {
  static_assert(kTileVectors == 3, "one case per number of vectors");
  if (columns > 32)
    return kernel_of_rows<Dot, 3>(rows);
  return columns > 16 ? kernel_of_rows<Dot, 2>(rows) : kernel_of_rows<Dot, 1>(rows);
}

template <class Dot> void add_tile(uint32_t *to, const uint32_t *from) {
  for (int i = 0; i < kTileWords; i += 16)
    Dot::store(to + i, Dot::add(Dot::load(to + i), Dot::load(from + i)));
}

// Lines of memory that will be packed next, fetched into the cache a few at a time while tiles are computed.
class Lines {
public:
  Lines() = default;
  Lines(const void *data, int64_t rows, int64_t bytes, int64_t stride)
      : at_(static_cast<const char *>(data)), rows_(rows), bytes_(bytes), stride_(stride) {}

  int64_t count() const { return rows_ * ((bytes_ + kLine - 1) / kLine); }

  void fetch(int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      _mm_prefetch(at_ + byte_, _MM_HINT_T1);
      byte_ += kLine;
      if (byte_ < bytes_)
        continue;
      byte_ = 0;
      at_ += stride_;
      --rows_;
    }
  }

private:
  static constexpr int64_t kLine = 64;
  const char *at_ = nullptr;
  int64_t rows_ = 0, bytes_ = 0, stride_ = 0, byte_ = 0;
};

// What a thread does: strips from the queue, block by block, part by part of the sum.
//
// `finish.expect(product, row, column, rows, columns)` is called before the last sums of a tile are made, and
// `finish(product, row, column, rows, columns, tile)` when they are there; if `Finish::adds`, both for every part.
template <class Dot, class Left, class Right, class Finish> class Worker {
  static_assert(Left::per_word == Right::per_word, "words of both sides hold the same numbers");

public:
  Worker(const std::vector<Product> &products, const std::vector<Strip> &strips, std::atomic<int64_t> &queue,
         const Finish &finish)
      : products_(products), strips_(strips), queue_(queue), finish_(finish) {}

  void run() {
    for (std::optional<Stage> stage = take(), next; stage; stage = next) {
      next = after(*stage);
      pack_rows(*stage);
      multiply(*stage, next ? rows_of(*next) : Lines(), next ? columns_of(*next) : Lines());
    }
  }

private:
  struct Stage {
    Strip strip;
    Cut cut;
    int64_t column, part; // of the strip, of the sum

    int64_t begin() const { return part * cut.steps * Left::per_word; }
    int64_t inner(const Product &product) const {
      return std::min(cut.steps * Left::per_word, product.inner - begin());
    }
    int64_t rows(const Product &product) const { return std::min(cut.rows, product.rows - strip.row); }
    int64_t columns() const { return std::min(kBlockColumns, strip.end - column); }
  };

  std::optional<Stage> take() {
    const int64_t index = queue_++;
    if (index >= static_cast<int64_t>(strips_.size()))
      return std::nullopt;
    const Strip &strip = strips_[index];
    return Stage{strip, Cut(products_[strip.product], Left::per_word), strip.column, 0};
  }

  std::optional<Stage> after(Stage stage) {
    if constexpr (Finish::adds) {
      stage.column += kBlockColumns;
      if (stage.column < stage.strip.end)
        return stage;
      stage.column = stage.strip.column;
      return ++stage.part < stage.cut.parts ? stage : take();
    } else {
      if (++stage.part < stage.cut.parts)
        return stage;
      stage.part = 0;
      stage.column += kBlockColumns;
      return stage.column < stage.strip.end ? stage : take();
    }
  }

  // The rows stay packed from one block of columns to the next.
  bool packed(const Stage &stage) const {
    return packed_product_ == stage.strip.product && packed_row_ == stage.strip.row && packed_part_ == stage.part;
  }

  // What a stage will pack of A and of B.
  Lines rows_of(const Stage &stage) const {
    const Product &product = products_[stage.strip.product];
    return packed(stage) ? Lines() : lines<typename Left::Element>(product.a, stage.strip.row, stage.rows(product), stage);
  }

  Lines columns_of(const Stage &stage) const {
    const Product &product = products_[stage.strip.product];
    return lines<typename Right::Element>(product.b, stage.column, stage.columns(), stage);
  }

  template <class Element>
  Lines lines(const Operand &operand, int64_t begin, int64_t outer, const Stage &stage) const {
    constexpr int64_t size = sizeof(Element);
    const int64_t inner = stage.inner(products_[stage.strip.product]);
    const char *data = static_cast<const char *>(operand.data) +
                       (begin * operand.outer_stride + stage.begin() * operand.inner_stride) * size;
    if (operand.outer_stride == 1)
      return Lines(data, inner, outer * size, operand.inner_stride * size);
    return operand.inner_stride == 1 ? Lines(data, outer, inner * size, operand.outer_stride * size) : Lines();
  }

  // Packed rows, packed columns, partial sums: one after the other.
  static uint32_t *memory_for(const Cut &cut) {
    return scratch_of_thread().words(cut.steps * (cut.rows + kBlockColumns) + cut.rows * kBlockColumns);
  }

  void pack_rows(const Stage &stage) {
    if (packed(stage))
      return;
    const Product &product = products_[stage.strip.product];
    pack<Left, kTileRows>(product.a, stage.strip.row, stage.rows(product), stage.begin(), stage.inner(product),
                          memory_for(stage.cut));
    packed_product_ = stage.strip.product;
    packed_row_ = stage.strip.row;
    packed_part_ = stage.part;
  }

  void multiply(const Stage &stage, Lines next_rows, Lines next_columns) {
    const Strip &strip = stage.strip;
    const Product &product = products_[strip.product];
    const int64_t rows = stage.rows(product), columns = stage.columns(), inner = stage.inner(product);
    const int64_t row_tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t column_tiles = (columns + kTileColumns - 1) / kTileColumns;
    const int64_t steps = (inner + Left::per_word - 1) / Left::per_word;
    const int64_t tiles = row_tiles * column_tiles;
    const int64_t rows_each = (next_rows.count() + tiles - 1) / tiles;
    const int64_t columns_each = (next_columns.count() + tiles - 1) / tiles;
    const uint32_t *a = memory_for(stage.cut);
    uint32_t *b = memory_for(stage.cut) + stage.cut.steps * stage.cut.rows;
    uint32_t *partial = b + stage.cut.steps * kBlockColumns;
    pack<Right, kTileColumns>(product.b, stage.column, columns, stage.begin(), inner, b);
    const bool first = Finish::adds || stage.part == 0, last = Finish::adds || stage.part + 1 == stage.cut.parts;
    alignas(64) uint32_t tile[kTileWords];
    alignas(64) uint32_t start[kTileColumns];
    for (int64_t c = 0; c < column_tiles; ++c) {
      const uint32_t *panel = b + c * steps * kTileColumns;
      const int64_t width = std::min<int64_t>(kTileColumns, columns - c * kTileColumns);
      const int64_t column = stage.column + c * kTileColumns;
      Dot::start(panel, steps, start);
      for (int64_t r = 0; r < row_tiles; ++r) {
        const int64_t height = std::min<int64_t>(kTileRows, rows - r * kTileRows), row = strip.row + r * kTileRows;
        uint32_t *sums = partial + (c * row_tiles + r) * kTileWords;
        next_rows.fetch(rows_each);
        next_columns.fetch(columns_each);
        if (last)
          finish_.expect(strip.product, row, column, height, width);
        tile_kernel<Dot>(height, width)(steps, a + r * steps * kTileRows, panel, start, first && !last ? sums : tile);
        if (!first)
          add_tile<Dot>(last ? tile : sums, last ? sums : tile);
        if (last)
          finish_(strip.product, row, column, height, width, tile);
      }
    }
  }

  const std::vector<Product> &products_;
  const std::vector<Strip> &strips_;
  std::atomic<int64_t> &queue_;
  const Finish &finish_;
  int64_t packed_product_ = -1, packed_row_ = -1, packed_part_ = -1; // whose rows lie packed
};

// The largest products first. Wide strips pack their rows once, narrow ones spread better over `threads`.
template <class Finish>
std::vector<Strip> strips_of(const std::vector<Product> &products, int64_t per_word, int64_t threads) {
  std::vector<int64_t> order(products.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return products[a].rows * products[a].inner > products[b].rows * products[b].inner;
  });
  int64_t blocks = 0;
  for (const Product &product : products) {
    const int64_t rows = Cut(product, per_word).rows;
    blocks += (product.rows + rows - 1) / rows * ((product.columns + kBlockColumns - 1) / kBlockColumns);
  }
  constexpr int64_t widest = 4;
  const int64_t spread = blocks / ((Finish::adds ? 4 : 16) * threads);
  const int64_t width = kBlockColumns * (threads == 1 ? widest : std::clamp<int64_t>(spread, 1, widest));
  std::vector<Strip> strips;
  for (const int64_t p : order)
    for (int64_t row = 0, rows = Cut(products[p], per_word).rows; row < products[p].rows; row += rows)
      for (int64_t column = 0; column < products[p].columns; column += width)
        strips.push_back({p, row, column, std::min(column + width, products[p].columns)});
  return strips;
}

template <class Dot, class Left, class Right, class Finish>
void multiply_all(const std::vector<Product> &products, const Finish &finish) {
  const std::vector<Strip> strips = strips_of<Finish>(products, Left::per_word, at::get_num_threads());
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(strips.size()));
  std::atomic<int64_t> queue{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Worker<Dot, Left, Right, Finish>(products, strips, queue, finish).run();
  });
}

} // namespace mindspeed
