// The loops of each level of instructions, as one table a level: the one place where a level's are chosen.
#pragma once

#include "kernels/group_codec.h"
#include "kernels/kernels.h"
#include "kernels/row_codecs.h"
#include "planes/scale_planes.h"

namespace flashllm {

// A number where it lies, which may be anywhere.
template <typename T>
static inline T load_as(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

struct LevelKernels {
  const KernelTable* tables;  // [3], by Dtype
  const PairKernels* pairs;   // nullptr where the level has none
  const TileKernels* tiles;   // the same
  const AttentionKernels* attention;
  SumFloats sum_floats;
  Softmax softmax;
  Sigmoids sigmoids;
  MultiplyAdd multiply_add;
  MultiplyCodes multiply_codes;  // nullptr, as the next two may be, where the level has none
  MultiplyBytes multiply_bytes;
  AddCodes add_codes;
  const StateStep* state_steps;               // [3], by Recurrence
  const CodecKernels* codecs;                 // [kCodedCodecs]
  const CodedInputKernels* int8;              // [kCodedCodecs]
  const CodedInputKernels* int16;             // [kInt16Codecs]
  const UnpackCodes* unpack;                  // [kCodedCodecs], or nullptrs
  const PlaneKernels (*planes)[kPlaneForms];  // [kPlaneCodecs]
  const GroupKernels* groups;                 // of 4 bits, and of 8
  const InputKernels* inputs;
};

// Throws CoreError (usage) where the processor lacks the level.
const LevelKernels& level_kernels(SimdLevel level);

}  // namespace flashllm
