// A level's table; included last by each kernels_<level>.cpp.

extern const LevelKernels kLevel;
const LevelKernels kLevel = {kTables,    nullptr, &kAttention, sum_floats, softmax, multiply_add,
                             delta_step, kCodecs, kInt8,       kInt16,     kPlanes};
