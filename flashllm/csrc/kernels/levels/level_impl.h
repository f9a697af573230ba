// A level's loops and its table, of the Vec before it; included last by each kernels_<level>.cpp.

#include "kernels/levels/kernels_impl.h"
#include "kernels/levels/row_codecs_impl.h"
#include "kernels/levels/row_codecs_inputs_impl.h"
#include "planes/scale_planes_impl.h"

extern const LevelKernels kLevel;
const LevelKernels kLevel = {kTables,    nullptr, &kAttention, sum_floats, softmax, multiply_add,
                             delta_step, kCodecs, kInt8,       kInt16,     kPlanes};
