// The arguments of the kernel in add_lora.cu, for it and for whoever launches it.
#pragma once

namespace onnxport_cuda {

constexpr int kPanel = 64;     // numbers of a row that lie side by side: PANEL in graphs/lora.py
constexpr int kWarp = 32;      // threads
constexpr int kMostWarps = 16;  // of a block
constexpr int kMostParts = 3;  // projections that one product computes
constexpr int kMostRank = 512;
static_assert(kMostWarps * kMostRank * sizeof(float) <= 48 << 10,
              "a block has this much shared memory, where the factors of its rows find room");

// What adapters add to the rows of a product. Pointers are to device memory; numbers are of the type
// that the kernel was compiled for. The layout of a slot is `slot_layout`'s in graphs/lora.py.
struct AddLora {
  const void* product;  // [rows][columns of all parts]
  const void* input;    // [rows][depth]
  const int* slots;     // [rows]; 0: no adapter
  const int* ranks;     // [num_slots + 1][ranks_stride]
  const void* weights;  // [num_slots][numbers]
  void* output;         // as the product, which it may be
  long long numbers, offset;
  int rows, depth, num_slots;
  int ranks_stride, first_rank;  // where a slot's ranks of this product are
  int max_rank;
  int parts;
  int columns[kMostParts];
  int warps_per_row;  // 1, or all of a block
  int tile_panels;    // of a part's columns, which a block computes
  int is_aligned;     // rows of all arrays begin at multiples of 16 bytes, and so do parts
};

// What a launch of the kernel takes beside its arguments.
struct Launch {
  unsigned int blocks_x, blocks_y, threads, shared_bytes;
};

// Few rows are computed by a block each; of many, a warp computes one, in as few tiles as leave every
// processor of a large GPU two blocks: it computes the row's factors for each anew.
constexpr int kFewRows = 64;
constexpr int kManyBlocks = 256;

inline int panels_of(int numbers) { return (numbers + kPanel - 1) / kPanel; }

// Fills in how the rows are divided, and returns the launch for it.
inline Launch plan(AddLora& call) {
  const bool is_few = call.rows <= kFewRows;
  call.warps_per_row = is_few ? kMostWarps : 1;
  const int rows_per_block = kMostWarps / call.warps_per_row;
  const int blocks = (call.rows + rows_per_block - 1) / rows_per_block;
  int panels = 0, tiles = 0;
  for (int part = 0; part < call.parts; part++) panels += panels_of(call.columns[part]);
  const int least = is_few ? panels : (kManyBlocks + blocks - 1) / blocks;
  const int fitting = (panels + least - 1) / least;
  call.tile_panels = fitting > kMostWarps ? fitting : kMostWarps;
  for (int part = 0; part < call.parts; part++)
    tiles += (panels_of(call.columns[part]) + call.tile_panels - 1) / call.tile_panels;
  const int sums = is_few ? kMostWarps * kWarp : 0;
  Launch launch{};
  launch.blocks_x = static_cast<unsigned int>(tiles);
  launch.blocks_y = static_cast<unsigned int>(blocks);
  launch.threads = kMostWarps * kWarp;
  launch.shared_bytes =
      static_cast<unsigned int>((rows_per_block * call.max_rank + sums) * sizeof(float));
  return launch;
}

}  // namespace onnxport_cuda
