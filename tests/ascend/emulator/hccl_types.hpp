// The types that cross the boundary of libhccl.so, as torch_npu's hccl_types.h lays them out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hccl {

// Codes of HcclResult that the emulator gives.
enum class Result : int32_t {
  success = 0,
  parameter = 1,
  pointer = 2,
  internal = 4,
  not_supported = 5,
  not_found = 6,
  unavailable = 7,
  timeout = 9,
  runtime = 15,
  remote = 21,
  suspending = 22,
};

enum class Reduction : int32_t { sum = 0, product = 1, maximum = 2, minimum = 3 };

enum class DataType : int32_t {
  int8 = 0,
  int16 = 1,
  int32 = 2,
  float16 = 3,
  float32 = 4,
  int64 = 5,
  uint64 = 6,
  uint8 = 7,
  uint16 = 8,
  uint32 = 9,
  float64 = 10,
  bfloat16 = 11,
  int128 = 12,
  hifloat8 = 14,
  float8_e4m3 = 15,
  float8_e5m2 = 16,
  float8_e8m0 = 17,
};

// Bytes of one element; 0 is an unknown type.
size_t size_of(DataType type);

struct RootInfo {
  char internal[4108];
};

inline constexpr size_t kNameBytes = 128;

// HcclCommConfig up to the last member that is used here; a caller's may be shorter or longer, as
// its first member says.
struct Config {
  uint64_t size;
  uint32_t magic;
  uint32_t version;
  uint64_t reserved;
  uint32_t buffer_size_mb;
  uint32_t deterministic;
  char name[kNameBytes];
  char user_name[kNameBytes];
  uint32_t expansion_mode;
  uint32_t traffic_class;
  uint32_t service_level;
  uint32_t world_rank;
  uint64_t job;
  uint8_t is_graph_zero_copy;
  int32_t exec_timeout_s;
};

inline constexpr uint32_t kConfigMagic = 0xf0f0f0f0;
inline constexpr int32_t kExecTimeoutNotSet = -1;

// HCCL_COMM_CONFIG_ALGO: what comes before it in HcclCommConfigCapability is understood.
inline constexpr uint32_t kConfigCapability = 9;

enum class Direction : int32_t { send = 0, receive = 1 };

struct SendReceive {
  Direction direction;
  void* buffer;
  uint64_t count;
  DataType type;
  uint32_t peer;
};

}  // namespace hccl
