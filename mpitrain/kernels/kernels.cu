// The kernels of mpitrain.kernels.cuda, one source for all types: T is the type of the arrays, W the
// one that is computed in.  A block has THREADS threads.  Sums over threads are in a fixed order.

#if KIND == 8
typedef double T;
typedef double W;
#elif KIND == 4
typedef float T;
typedef float W;
#elif KIND == 2
// float16, by two instructions: no header of the toolkit is needed.
struct T {
    unsigned short bits;
    T() = default;
    __device__ T(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
typedef float W;
#else
// bfloat16: the upper half of a float, rounded to the nearest even one.
struct T {
    unsigned short bits;
    T() = default;
    __device__ T(float value) {
        unsigned int all = __float_as_uint(value);
        bool is_number = (all & 0x7fffffffu) <= 0x7f800000u;
        bits = is_number ? (all + 0x7fffu + ((all >> 16) & 1u)) >> 16 : (all >> 16) | 0x40u;
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};
typedef float W;
#endif

// Type of the scale of a row.
#if KIND == 1
typedef float S;
#else
typedef T S;
#endif

typedef long long Index;

#define EACH(i, n) \
    for (Index i = blockIdx.x * (Index)THREADS + threadIdx.x; i < (n); i += gridDim.x * (Index)THREADS)
#define OWN(c, columns) for (Index c = threadIdx.x; c < (columns); c += THREADS)

// The sum of every thread's value, on every thread.
template <typename V>
__device__ V block_sum(V value) {
    __shared__ V part[THREADS];
    part[threadIdx.x] = value;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] = part[threadIdx.x] + part[threadIdx.x + half];
        __syncthreads();
    }
    V sum = part[0];
    __syncthreads();
    return sum;
}

// The largest of them; NaN if one is.
__device__ W block_max(W value) {
    __shared__ W part[THREADS];
    part[threadIdx.x] = value;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            W a = part[threadIdx.x], b = part[threadIdx.x + half];
            part[threadIdx.x] = a != a || a > b ? a : b;
        }
        __syncthreads();
    }
    W most = part[0];
    __syncthreads();
    return most;
}

__device__ W exponential(W x) { return sizeof(W) == 8 ? (W)exp((double)x) : (W)expf((float)x); }
__device__ W logarithm(W x) { return sizeof(W) == 8 ? (W)log((double)x) : (W)logf((float)x); }
__device__ W root(W x) { return sizeof(W) == 8 ? (W)sqrt((double)x) : (W)sqrtf((float)x); }
__device__ W tangent(W x) { return sizeof(W) == 8 ? (W)tanh((double)x) : (W)tanhf((float)x); }
__device__ W minus_infinity() { return (W)(-1e30f * 1e30f); }

// Mean and 1 / deviation of a row.
__device__ void moments(const T* row, Index columns, double epsilon, W& mean, W& scale) {
    W sum = 0;
    OWN(c, columns) sum += (W)row[c];
    mean = block_sum<W>(sum) / (W)columns;
    W squares = 0;
    OWN(c, columns) {
        W apart = (W)row[c] - mean;
        squares += apart * apart;
    }
    scale = (W)1 / root(block_sum<W>(squares) / (W)columns + (W)epsilon);
}

extern "C" {

__global__ void gelu(const T* x, T* y, T* saved, Index n) {
    const W scale = (W)0.7978845608028654, cubic = (W)0.044715;
    EACH(i, n) {
        W v = (W)x[i], t = tangent((v * v * (scale * cubic) + scale) * v);
        saved[i] = (T)t;
        y[i] = (T)((t + (W)1) * v * (W)0.5);
    }
}

__global__ void gelu_gradient(const T* x, const T* saved, const T* dy, T* dx, Index n) {
    const W scale = (W)0.7978845608028654, cubic = (W)0.044715;
    EACH(i, n) {
        W v = (W)x[i], t = (W)saved[i];
        W slope = (v * v * ((W)3 * scale * cubic) + scale) * v;
        dx[i] = (T)((slope - slope * (t * t) + t + (W)1) * (W)dy[i] * (W)0.5);
    }
}

__global__ void normalise(const T* x, T* normal, S* scales, double epsilon, Index columns) {
    Index first = blockIdx.x * columns;
    W mean, scale;
    moments(x + first, columns, epsilon, mean, scale);
    OWN(c, columns) normal[first + c] = (T)(((W)x[first + c] - mean) * scale);
    if (threadIdx.x == 0) scales[blockIdx.x] = (S)scale;
}

__global__ void layer_norm(
    const T* x, const T* weight, const T* bias, T* y, T* normal, S* scales, double epsilon,
    Index columns
) {
    Index first = blockIdx.x * columns;
    W mean, scale;
    moments(x + first, columns, epsilon, mean, scale);
    OWN(c, columns) {
        W value = ((W)x[first + c] - mean) * scale;
        normal[first + c] = (T)value;
        y[first + c] = (T)(value * (W)weight[c] + (W)bias[c]);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = (S)scale;
}

__global__ void normalise_gradient(
    const T* dnormal, const T* normal, const S* scales, T* dx, Index columns
) {
    Index first = blockIdx.x * columns;
    W along_mean = 0, along_normal = 0;
    OWN(c, columns) {
        W d = (W)dnormal[first + c];
        along_mean += d;
        along_normal += d * (W)normal[first + c];
    }
    along_mean = block_sum<W>(along_mean) / (W)columns;
    along_normal = block_sum<W>(along_normal) / (W)columns;
    W scale = (W)scales[blockIdx.x];
    OWN(c, columns) {
        W d = (W)dnormal[first + c] - along_mean - (W)normal[first + c] * along_normal;
        dx[first + c] = (T)(d * scale);
    }
}

__global__ void layer_norm_gradient(
    const T* dy, const T* weight, const T* normal, const S* scales, T* dx, Index columns
) {
    Index first = blockIdx.x * columns;
    W along_mean = 0, along_normal = 0;
    OWN(c, columns) {
        W d = (W)dy[first + c] * (W)weight[c];
        along_mean += d;
        along_normal += d * (W)normal[first + c];
    }
    along_mean = block_sum<W>(along_mean) / (W)columns;
    along_normal = block_sum<W>(along_normal) / (W)columns;
    W scale = (W)scales[blockIdx.x];
    OWN(c, columns) {
        W d = (W)dy[first + c] * (W)weight[c];
        d = d - along_mean - (W)normal[first + c] * along_normal;
        dx[first + c] = (T)(d * scale);
    }
}

// A block has 32 columns; its threads share the rows.
__global__ void norm_gradients(
    const T* dy, const T* normal, T* weight, T* bias, Index rows, Index columns
) {
    __shared__ W weights[THREADS], biases[THREADS];
    Index column = blockIdx.x * 32 + threadIdx.x % 32;
    W along = 0, sum = 0;
    if (column < columns) {
        for (Index r = threadIdx.x / 32; r < rows; r += THREADS / 32) {
            W d = (W)dy[r * columns + column];
            along += d * (W)normal[r * columns + column];
            sum += d;
        }
    }
    weights[threadIdx.x] = along;
    biases[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32 && column < columns) {
        for (int other = threadIdx.x + 32; other < THREADS; other += 32) {
            along += weights[other];
            sum += biases[other];
        }
        weight[column] = (T)along;
        bias[column] = (T)sum;
    }
}

// A block is a query, which sees the positions up to its own.
__global__ void causal_softmax(T* scores, double factor, Index positions) {
    T* row = scores + blockIdx.x * positions;
    Index seen = blockIdx.x % positions + 1;
    W most = minus_infinity();
    OWN(c, seen) {
        W value = (W)row[c] * (W)factor;
        most = value != value || value > most ? value : most;
    }
    most = block_max(most);
    W sum = 0;
    OWN(c, seen) sum += exponential((W)row[c] * (W)factor - most);
    sum = block_sum<W>(sum);
    OWN(c, positions) {
        row[c] = (T)(c < seen ? exponential((W)row[c] * (W)factor - most) / sum : (W)0);
    }
}

__global__ void causal_softmax_gradient(
    T* gradients, const T* attention, double factor, Index positions
) {
    T* row = gradients + blockIdx.x * positions;
    const T* part = attention + blockIdx.x * positions;
    W along = 0;
    OWN(c, positions) along += (W)row[c] * (W)part[c];
    along = block_sum<W>(along);
    OWN(c, positions) row[c] = (T)(((W)row[c] - along) * (W)part[c] * (W)factor);
}

__global__ void softmax_loss(
    const T* scores, const Index* labels, T* losses, T* gradient, double divisor, double smoothing,
    Index columns
) {
    Index first = blockIdx.x * columns, label = labels[blockIdx.x];
    const T* row = scores + first;
    W most = minus_infinity(), sum = 0, all = 0;
    OWN(c, columns) {
        W value = (W)row[c];
        most = value != value || value > most ? value : most;
    }
    most = block_max(most);
    OWN(c, columns) {
        sum += exponential((W)row[c] - most);
        all += (W)row[c] - most;
    }
    sum = block_sum<W>(sum);
    all = block_sum<W>(all);
    W sharp = (W)(1 - smoothing), even = (W)(smoothing / columns);
    OWN(c, columns) {
        W part = exponential((W)row[c] - most) / sum - even - (c == label ? sharp : (W)0);
        gradient[first + c] = (T)(part / (W)divisor);
    }
    if (threadIdx.x == 0) {
        W own = label >= 0 && label < columns ? sharp * ((W)row[label] - most) : (W)0;
        losses[blockIdx.x] = (T)(logarithm(sum) - own - even * all);
    }
}

// A block has TABLE_ROWS rows of the table, and reads all row numbers: no two threads ever add to
// the same element, and each element's values come in their order.
__global__ void scatter_add(
    W* table, const Index* rows, const T* values, Index count, Index height, Index width
) {
    __shared__ Index tile[THREADS];
    Index low = blockIdx.x * (Index)16, high = low + 16 < height ? low + 16 : height;
    for (Index start = 0; start < count; start += THREADS) {
        Index mine = start + threadIdx.x;
        tile[threadIdx.x] = mine < count ? rows[mine] : -1;
        __syncthreads();
        for (int k = 0; k < THREADS; k++) {
            Index row = tile[k];
            if (row < low || row >= high) continue;
            OWN(c, width) {
                table[row * width + c] += (W)values[(start + k) * width + c];
            }
        }
        __syncthreads();
    }
}

__global__ void sgd(
    T* p, T* g, T* velocity, Index n, double rate, double scale, double momentum, double decay,
    Index nesterov
) {
    EACH(i, n) {
        W own = (W)p[i], d = (W)g[i] * (W)scale;
        g[i] = (T)d;
        d += (W)decay * own;
        W v = (W)momentum * (W)velocity[i] + d;
        velocity[i] = (T)v;
        if (nesterov) v = d + (W)momentum * v;
        p[i] = (T)(own - v * (W)rate);
    }
}

__device__ W adams(
    W own, W d, T& mean, T& square, double beta1, double beta2, double epsilon, double decay,
    Index decoupled, double first, double second
) {
    if (!decoupled) d += (W)decay * own;
    W m = (W)mean, v = (W)square;
    m = beta1 == 0 ? d : m + (W)(1 - beta1) * (d - m);
    v = beta2 == 0 ? d * d : v + (W)(1 - beta2) * (d * d - v);
    mean = (T)m;
    square = (T)v;
    W direction = m / (root(v) * (W)second + (W)epsilon) * (W)first;
    return decoupled ? direction + (W)decay * own : direction;
}

__global__ void adam(
    T* p, T* g, T* mean, T* square, Index n, double rate, double scale, double beta1, double beta2,
    double epsilon, double decay, Index decoupled, double first, double second
) {
    EACH(i, n) {
        W own = (W)p[i], d = (W)g[i] * (W)scale;
        g[i] = (T)d;
        d = adams(
            own, d, mean[i], square[i], beta1, beta2, epsilon, decay, decoupled, first, second
        );
        p[i] = (T)(own - d * (W)rate);
    }
}

__global__ void adam_direction(
    const T* p, const T* g, T* mean, T* square, T* direction, Index n, double beta1, double beta2,
    double epsilon, double decay, Index decoupled, double first, double second
) {
    EACH(i, n) {
        W own = (W)p[i], d = (W)g[i];
        d = adams(
            own, d, mean[i], square[i], beta1, beta2, epsilon, decay, decoupled, first, second
        );
        direction[i] = (T)d;
    }
}

__global__ void square_sums(const T* x, Index n, double* partial) {
    double sum = 0;
    EACH(i, n) {
        double value = (double)(W)x[i];
        sum += value * value;
    }
    sum = block_sum<double>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void sum_in_order(const double* partial, Index n, double* found) {
    double sum = 0;
    OWN(i, n) sum += partial[i];
    sum = block_sum<double>(sum);
    if (threadIdx.x == 0) found[0] = sum;
}

}  // extern "C"
