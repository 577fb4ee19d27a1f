#include "hccl_reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace hccl {
namespace {

constexpr size_t kMaxSegmentBytes = 1024 * 1024;  // gloo's kMaxSegmentSize

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t to_bfloat16(float value) {
  if (value != value) return 0x7fc0;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_float16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to more than 65504
  if (magnitude < 0x38800000) {  // subnormal: the addition rounds at the last place of float16
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

template <uint16_t Encode(float), float Decode(uint16_t)>
struct Narrow {
  uint16_t bits;
  Narrow() = default;
  explicit Narrow(float value) : bits(Encode(value)) {}
  float wide() const { return Decode(bits); }
  friend Narrow operator+(Narrow a, Narrow b) { return Narrow(a.wide() + b.wide()); }
  friend Narrow operator*(Narrow a, Narrow b) { return Narrow(a.wide() * b.wide()); }
  friend bool operator<(Narrow a, Narrow b) { return a.wide() < b.wide(); }
};

using BFloat16 = Narrow<to_bfloat16, from_bfloat16>;
using Float16 = Narrow<to_float16, from_float16>;

// Integers wrap: the sum of two int8 is an int8 again.
template <typename T>
T plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <typename T>
T times(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// result = own (+) received, element by element; the order of the operands matters to NaN.
template <typename T>
void combine(T* result, const T* own, const T* received, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      for (size_t i = 0; i < count; i++) result[i] = plus(own[i], received[i]);
      return;
    case Reduction::product:
      for (size_t i = 0; i < count; i++) result[i] = times(own[i], received[i]);
      return;
    case Reduction::maximum:
      for (size_t i = 0; i < count; i++) result[i] = own[i] < received[i] ? received[i] : own[i];
      return;
    case Reduction::minimum:
      for (size_t i = 0; i < count; i++) result[i] = received[i] < own[i] ? received[i] : own[i];
      return;
  }
}

void combine(void* result, const void* own, const void* received, size_t count, DataType type,
             Reduction reduction) {
  const auto as = [&]<typename T>(T) {
    combine(static_cast<T*>(result), static_cast<const T*>(own), static_cast<const T*>(received),
            count, reduction);
  };
  switch (type) {
    case DataType::int8: return as(int8_t{});
    case DataType::int16: return as(int16_t{});
    case DataType::int32: return as(int32_t{});
    case DataType::int64: return as(int64_t{});
    case DataType::float16: return as(Float16{});
    case DataType::bfloat16: return as(BFloat16{});
    case DataType::float32: return as(float{});
    default: return;  // is_reducible() refused it
  }
}

// Both of gloo's ring algorithms cut the data into segments, an equal number per rank.
size_t chunk_elements(size_t num_segments, size_t segment_bytes, size_t element_bytes,
                      size_t num_ranks) {
  return std::max<size_t>(1, num_segments / num_ranks * segment_bytes / element_bytes);
}

}  // namespace

size_t size_of(DataType type) {
  switch (type) {
    case DataType::int8:
    case DataType::uint8:
    case DataType::hifloat8:
    case DataType::float8_e4m3:
    case DataType::float8_e5m2:
    case DataType::float8_e8m0: return 1;
    case DataType::int16:
    case DataType::uint16:
    case DataType::float16:
    case DataType::bfloat16: return 2;
    case DataType::int32:
    case DataType::uint32:
    case DataType::float32: return 4;
    case DataType::int64:
    case DataType::uint64:
    case DataType::float64: return 8;
    case DataType::int128: return 16;
  }
  return 0;
}

bool is_reducible(DataType type, Reduction reduction) {
  switch (type) {
    case DataType::int16:
    case DataType::bfloat16: return reduction != Reduction::product;
    case DataType::int8:
    case DataType::int32:
    case DataType::int64:
    case DataType::float16:
    case DataType::float32: return true;
    default: return false;
  }
}

size_t chunk_of_all_reduce(size_t count, size_t element_bytes, size_t num_ranks) {
  const size_t total = count * element_bytes;
  const size_t limit = element_bytes * std::max<size_t>(1, kMaxSegmentBytes / element_bytes);
  const size_t num_segments =
      round_up(std::max((total + limit - 1) / limit, num_ranks * 2), num_ranks);
  const size_t segment = round_up((total + num_segments - 1) / num_segments, element_bytes);
  return chunk_elements(num_segments, segment, element_bytes, num_ranks);
}

size_t chunk_of_reduce(size_t count, size_t element_bytes, size_t num_ranks) {
  const size_t total = count * element_bytes;
  const size_t limit = element_bytes * (kMaxSegmentBytes / element_bytes);
  const size_t wanted = (total + num_ranks * 2 - 1) / (num_ranks * 2);
  const size_t segment = std::max(round_up(std::min(wanted, limit), element_bytes), element_bytes);
  const size_t num_segments =
      round_up(std::max((total + segment - 1) / segment, num_ranks * 2), num_ranks);
  return chunk_elements(num_segments, segment, element_bytes, num_ranks);
}

void reduce_range(std::span<const void* const> inputs, void* output, Range range,
                  size_t chunk_elements, DataType type, Reduction reduction) {
  const size_t width = size_of(type);
  const size_t num_ranks = inputs.size();
  std::vector<char> partial;
  for (size_t done = 0; done < range.count;) {
    const size_t element = range.begin + done;
    const size_t chunk = element / chunk_elements % num_ranks;
    const size_t count = std::min(range.count - done, chunk_elements - element % chunk_elements);
    const auto part = [&](size_t rank) {
      return static_cast<const char*>(inputs[rank % num_ranks]) + done * width;
    };
    // Not straight into the output, which may be an input that is still to come.
    partial.assign(part(chunk + num_ranks - 1), part(chunk + num_ranks - 1) + count * width);
    for (size_t step = 2; step <= num_ranks; step++) {
      combine(partial.data(), part(chunk + num_ranks - step), partial.data(), count, type, reduction);
    }
    std::memcpy(static_cast<char*>(output) + done * width, partial.data(), count * width);
    done += count;
  }
}

}  // namespace hccl
