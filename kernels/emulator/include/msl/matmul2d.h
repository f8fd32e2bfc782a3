// MetalPerformancePrimitives' matmul2d: matrix products of tensors that are in memory or distributed over threads.
#pragma once

namespace mpp {
namespace tensor_ops {
using namespace metal;

template <class T>
struct dynamic_length {
  static constexpr T value = numeric_limits<T>::max();
};
template <class T>
inline constexpr T dynamic_length_v = dynamic_length<T>::value;

enum class reduction_operation { sum, max, min };
template <class T>
struct reduction_operation_identity {
  static constexpr T sum_identity = T(0), max_identity = numeric_limits<T>::lowest(),
                     min_identity = numeric_limits<T>::max();
};

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int rows, int columns, int inner = int(dynamic_extent), bool left = false,
                                bool right = false, bool relaxed = false, mode how = mode::multiply)
      : m(rows),
        n(columns),
        k(inner),
        transpose_left(left),
        transpose_right(right),
        relaxed_precision(relaxed),
        matmul_mode(how) {}
  constexpr bool msl_has_inner() const { return k > 0 && k != dynamic_length_v<int>; }
};

// ---- types that can be multiplied ----

template <class T>
inline constexpr bool msl_is_byte = is_same_v<T, char> || is_same_v<T, int8_t> || is_same_v<T, uint8_t>;
template <class T>
inline constexpr bool msl_is_few_bits = is_same_v<T, int4b_format> || is_same_v<T, uint4b_format> ||
                                        is_same_v<T, int2b_format> || is_same_v<T, uint2b_format>;
template <class T>
inline constexpr bool msl_is_small_float = is_same_v<T, metal_fp4_e2m1_format> ||
                                           is_same_v<T, metal_fp8_e4m3_format> || is_same_v<T, metal_fp8_e5m2_format>;
template <class D, class A, class B>
inline constexpr bool msl_is_one_of = is_same_v<D, A> || is_same_v<D, B>;
// The destination of floating-point factors is float, or the type of a factor if neither factor is float.
template <class D, class A, class B>
inline constexpr bool msl_is_product = is_same_v<D, float> || (!is_same_v<A, float> && !is_same_v<B, float> &&
                                                               msl_is_one_of<D, A, B> && is_floating_point_v<D>);

template <class A, class B, class D>
constexpr bool msl_can_multiply() {
  if constexpr (is_floating_point_v<A> && is_floating_point_v<B>) return msl_is_product<D, A, B>;
  else if constexpr (is_floating_point_v<A> && msl_is_byte<B>) return msl_is_product<D, A, A>;
  else if constexpr (msl_is_byte<A> && is_floating_point_v<B>) return msl_is_product<D, B, B>;
  else if constexpr (msl_is_byte<A> && msl_is_byte<B>) return is_same_v<D, int> || msl_is_product<D, half, half>;
  else if constexpr (is_floating_point_v<A> && msl_is_few_bits<B>) return msl_is_product<D, A, A>;
  else if constexpr (msl_is_byte<A> && msl_is_few_bits<B>) return is_same_v<D, int>;
  else if constexpr (is_same_v<A, half> && msl_is_small_float<B>) return msl_is_product<D, half, half>;
  else return msl_is_small_float<A> && is_same_v<A, B> && msl_is_product<D, half, half>;
}

// ---- one operation of all threads of a scope: the first thread that continues computes it for all ----

template <class L, class R, class D>
struct msl_brought {
  L* left;
  R* right;
  D* destination;
};

// A copy of a matrix for a product. Rows are `row` elements apart, columns `column` elements.
template <class N>
struct msl_spread_out {
  N* at;
  long row, column;
  MSL_FUNC N& of(long r, long c) const { return at[r * row + c * column]; }
};

template <class N, class T>
MSL_FUNC N msl_number(T value, bool rounds) {
  N number = N(value);
  if constexpr (is_same_v<T, float> && is_same_v<N, float>)
    if (rounds) number = __builtin_bit_cast(float, __builtin_bit_cast(uint, number) & 0xFFFFE000u);
  return number;
}

struct msl_matrix {
  int rows, columns;
  const char* name;
  const char* file;
  unsigned line;
  bool rounds;
};

// The function is inlined, so that the emulator reports the line of the kernel's call for every access to memory.
template <class N, class T>
MSL_FUNC void msl_collect(const T& memory, const msl_matrix& matrix, msl_spread_out<N> to) {
  for (long row = 0; row < matrix.rows; row++)
    for (long column = 0; column < matrix.columns; column++) {
      const long at[2] = {column, row};
      to.of(row, column) = msl_inside(memory, at, matrix.file, matrix.line)
                               ? msl_number<N>(memory.element(at), matrix.rounds)
                               : N(0);
    }
}
template <class N, class T>
MSL_FUNC void msl_deliver(const T& memory, const msl_matrix& matrix, msl_spread_out<N> from) {
  for (long row = 0; row < matrix.rows; row++)
    for (long column = 0; column < matrix.columns; column++) {
      const long at[2] = {column, row};
      if (msl_inside(memory, at, matrix.file, matrix.line))
        memory.element(at) = typename T::value_type(from.of(row, column));
    }
}

// Collect the elements of a cooperative tensor from the threads of the scope; `get` returns the tensor of a thread.
template <class N, class G>
MSL_LARGE_FUNC void msl_collect_shares(const msl_met& met, G get, const msl_matrix& matrix, msl_spread_out<N> to,
                                       bool is_input) {
  const msl_layout* places = get(met.brought[0])->places;
  bool is_placed = *places->asked, differ = false;
  const void* first = nullptr;
  for (unsigned t = 0; t < met.threads; t++) {
    auto* share = get(met.brought[t]);
    is_placed = is_placed || share->is_placed;
    for (unsigned i = 0; i < places->capacity; i++) {
      msl_at at = places->at[t * places->capacity + i];
      if (at.row < 0) continue;
      auto value = share->elements[i];
      if (msl_is_never_written(value))
        msl_tensor_wrong(matrix.file, matrix.line,
                         is_input ? "element [%d, %d] of %s was never written\n"
                                    "set all elements that are valid, to 0 where the matrix has ended"
                                  : "element [%d, %d] of %s, to which a product is added, was never written\n"
                                    "set all elements to 0 first, or multiply without accumulation",
                         at.column, at.row, matrix.name);
      to.of(at.row, at.column) = msl_number<N>(value, matrix.rounds);
      if (!first) first = &share->elements[i];
      differ = differ || __builtin_memcmp(&value, first, sizeof value) != 0;
    }
  }
  if (is_input && differ && !is_placed) msl_tensor_unplaced(matrix.file, matrix.line, matrix.name);
}
template <class N, class G>
MSL_LARGE_FUNC void msl_deliver_shares(const msl_met& met, G get, msl_spread_out<N> from) {
  const msl_layout* places = get(met.brought[0])->places;
  for (unsigned t = 0; t < met.threads; t++) {
    auto* share = get(met.brought[t]);
    share->is_placed = true;
    for (unsigned i = 0; i < places->capacity; i++) {
      msl_at at = places->at[t * places->capacity + i];
      if (at.row >= 0) share->elements[i] = decltype(+share->elements[0])(from.of(at.row, at.column));
    }
  }
}

// All threads must pass the same tensor in memory.
template <class G>
MSL_LARGE_FUNC void msl_check_same(const msl_met& met, G get, const msl_matrix& matrix) {
  auto* first = get(met.brought[0]);
  for (unsigned t = 1; t < met.threads; t++) {
    auto* other = get(met.brought[t]);
    bool same = first->data == other->data;
    for (int axis = 0; axis < 2; axis++)
      same = same && first->counts.extent(axis) == other->counts.extent(axis) &&
             first->origin[axis] == other->origin[axis] && first->strides[axis] == other->strides[axis];
    if (same) continue;
    msl_tensor_wrong(matrix.file, matrix.line,
                     "%s is another tensor for thread %u than for thread 0 of the operation\n"
                     "all threads of its scope must pass the same tensors; use execution_simdgroup to give each "
                     "SIMD-group its own",
                     matrix.name, t);
  }
}

// Check static extents: an axis must be as long as the operation needs. Without `whole_rows` or `whole_columns`, it may
// also be longer.
template <class T>
MSL_FUNC void msl_check_extents(const msl_matrix& matrix, bool whole_rows, bool whole_columns) {
  static_assert(T::msl_rank == 2, "matmul2d: expected a tensor of two axes");
  constexpr size_t columns = T::extents_type::static_extent(0), rows = T::extents_type::static_extent(1);
  bool fits = (columns == dynamic_extent || (whole_columns ? long(columns) == matrix.columns : long(columns) >= matrix.columns)) &&
              (rows == dynamic_extent || (whole_rows ? long(rows) == matrix.rows : long(rows) >= matrix.rows));
  if (!fits)
    msl_tensor_wrong(matrix.file, matrix.line,
                     "%s has static extents %ld x %ld, and the descriptor needs %d x %d\n"
                     "the first axis counts columns; correct the extents, the descriptor or its transposition",
                     matrix.name, long(columns), long(rows), matrix.columns, matrix.rows);
}

template <matmul2d_descriptor Descriptor, class Scope, class... Args>
class matmul2d {
  static constexpr unsigned simdgroups = Scope::msl_simdgroups;
  static constexpr int m = Descriptor.m, n = Descriptor.n, k = Descriptor.k;
  static_assert(m > 0 && n > 0, "matmul2d_descriptor: expected m and n above 0");
  static_assert(!Descriptor.msl_has_inner() || k % 16 == 0, "matmul2d_descriptor: k must be dynamic or a multiple of 16");
  static_assert(!simdgroups || m % 16 == 0 || n % 16 == 0,
                "matmul2d_descriptor: at least one of m and n must be a multiple of 16");
  static_assert((m < 8 ? m != 3 && m < 5 : m % 8 == 0) && (n < 8 ? n != 3 && n < 5 : n % 8 == 0),
                "matmul2d_descriptor: m and n must be 1, 2, 4 or multiples of 8");

  template <class T>
  static constexpr bool is_shared = is_cooperative_tensor_v<__remove_cv(T)>;
  template <class T>
  static constexpr bool is_operand = is_shared<T> || is_tensor_v<T>;
  static constexpr int left_rows = Descriptor.transpose_left ? k : m, left_columns = Descriptor.transpose_left ? m : k;
  static constexpr int right_rows = Descriptor.transpose_right ? n : k, right_columns = Descriptor.transpose_right ? k : n;

  template <int Operand, int Rows, int Columns, class E, class L, class R, class I>
  using share = cooperative_tensor<E, extents<I, size_t(Columns), size_t(Rows)>,
                                   msl_share<Operand, Rows, Columns, Scope, L, R>>;
  template <int Operand, size_t Count, class E, class L, class R, class I>
  using results = cooperative_tensor<E, extents<I, Count>, msl_share<Operand, m, n, Scope, L, R>>;

 public:
  static constexpr matmul2d_descriptor descriptor = Descriptor;
  typedef Scope scope;

  // ---- cooperative operands and results ----

  template <class L, class R, class E, class I = int>
  using cooperative_tensor_left_input_t = share<MSL_LEFT, left_rows, left_columns, L, L, R, I>;
  template <class L, class R, class E, class I = int>
  using cooperative_tensor_right_input_t = share<MSL_RIGHT, right_rows, right_columns, R, L, R, I>;
  template <class L, class R, class E, class I = int>
  using cooperative_tensor_destination_t =
      share<MSL_DESTINATION, m, n, E, typename L::value_type, typename R::value_type, I>;
  template <class L, class R, class E, class I = int>
  using cooperative_tensor_row_reduction_destination_t =
      results<MSL_ROW_RESULTS, m, E, typename L::value_type, typename R::value_type, I>;
  template <class L, class R, class E, class I = int>
  using cooperative_tensor_column_reduction_destination_t =
      results<MSL_COLUMN_RESULTS, n, E, typename L::value_type, typename R::value_type, I>;

  template <class L, class R, class E, class I = int>
  MSL_FUNC cooperative_tensor_left_input_t<L, R, E, I> get_left_input_cooperative_tensor() const {
    check_input();
    return {};
  }
  template <class L, class R, class E, class I = int>
  MSL_FUNC cooperative_tensor_right_input_t<L, R, E, I> get_right_input_cooperative_tensor() const {
    check_input();
    return {};
  }
  template <class L, class R, class E, class I = int>
  MSL_FUNC cooperative_tensor_destination_t<L, R, E, I> get_destination_cooperative_tensor() const {
    static_assert(msl_can_multiply<typename L::value_type, typename R::value_type, E>(),
                  "matmul2d: these types cannot be multiplied into that destination");
    return {};
  }
  template <class L, class R, class E, class I = int>
  MSL_FUNC cooperative_tensor_row_reduction_destination_t<L, R, E, I>
  get_row_reduction_destination_cooperative_tensor() const {
    return {};
  }
  template <class L, class R, class E, class I = int>
  MSL_FUNC cooperative_tensor_column_reduction_destination_t<L, R, E, I>
  get_column_reduction_destination_cooperative_tensor() const {
    return {};
  }

  // Whether a destination can be an operand of the next product: whether destination and operand have the same layout.
  template <class L, class R, class E, class S, class X, class Y>
  MSL_FUNC bool is_compatible_as_left_input(const cooperative_tensor<S, X, Y>& source) const {
    return is_same_v<S, L> && source.places->copies;
  }
  template <class L, class R, class E, class S, class X, class Y>
  MSL_FUNC bool is_compatible_as_right_input(const cooperative_tensor<S, X, Y>& source) const {
    return is_same_v<S, R> && source.places->copies;
  }
  template <class L, class R, class E, class I = int, class S, class X, class Y>
  MSL_FUNC cooperative_tensor_left_input_t<L, R, E, I> get_left_input_cooperative_tensor(
      const cooperative_tensor<S, X, Y>& source, MSL_HERE) const {
    check_input();
    static_assert(!Descriptor.transpose_left, "matmul2d: the left cooperative tensor cannot be transposed");
    static_assert(is_same_v<S, L> && Y::operand == MSL_DESTINATION && Y::rows == m && Y::columns == k,
                  "matmul2d: expected the destination of another product, m x k elements of the left operand's type");
    static_assert(Y::simdgroups == simdgroups, "matmul2d: expected the destination of a product of one SIMD-group");
    cooperative_tensor_left_input_t<L, R, E, I> result;
    copy(source, result, "is_compatible_as_left_input", file, line);
    return result;
  }
  template <class L, class R, class E, class I = int, class S, class X, class Y>
  MSL_FUNC cooperative_tensor_right_input_t<L, R, E, I> get_right_input_cooperative_tensor(
      const cooperative_tensor<S, X, Y>& source, MSL_HERE) const {
    check_input();
    static_assert(!Descriptor.transpose_right, "matmul2d: the right cooperative tensor cannot be transposed");
    static_assert(is_same_v<S, R> && Y::operand == MSL_DESTINATION && Y::rows == k && Y::columns == n,
                  "matmul2d: expected the destination of another product, k x n elements of the right operand's type");
    static_assert(Y::simdgroups == simdgroups, "matmul2d: expected the destination of a product of one SIMD-group");
    cooperative_tensor_right_input_t<L, R, E, I> result;
    copy(source, result, "is_compatible_as_right_input", file, line);
    return result;
  }

  // ---- the product ----

  template <class... RunArgs, class L, class R, class D>
    requires(is_operand<L> && is_operand<R> && is_operand<D>)
  MSL_FUNC void run(L& left, R& right, D& destination, MSL_HERE) const {
    typedef __remove_cv(L) left_t;
    typedef __remove_cv(R) right_t;
    typedef __remove_cv(D) destination_t;
    typedef typename left_t::value_type A;
    typedef typename right_t::value_type B;
    typedef typename destination_t::value_type E;
    static_assert(msl_can_multiply<A, B, E>(), "matmul2d: these types cannot be multiplied into that destination");
    if constexpr (is_shared<D>)
      static_assert(is_same_v<A, typename destination_t::layout::left_type> &&
                        is_same_v<B, typename destination_t::layout::right_type>,
                    "matmul2d: the types of the operands must be those that the destination was made for");
    if constexpr (is_shared<L>) check_share<left_t, MSL_LEFT, left_rows, left_columns>();
    if constexpr (is_shared<R>) check_share<right_t, MSL_RIGHT, right_rows, right_columns>();
    if constexpr (is_shared<D>) check_share<destination_t, MSL_DESTINATION, m, n>();
    msl_brought<L, R, D> mine{&left, &right, &destination};
    msl_met met;
    msl_meet(simdgroups, &mine, "matmul2d::run", file, line, &met);
    if (met.first) multiply<L, R, D, conditional_t<is_same_v<E, int>, int, float>>(met, mine, file, line);
  }

 private:
  static constexpr void check_input() {
    static_assert(is_same_v<Scope, execution_simdgroup>, "matmul2d: cooperative operands need execution_simdgroup");
    static_assert(Descriptor.msl_has_inner(), "matmul2d: k cannot be dynamic with cooperative operands");
  }
  template <class T, int Operand, int Rows, int Columns>
  static constexpr void check_share() {
    typedef typename T::layout Y;
    static_assert(Y::operand == Operand && is_same_v<typename Y::scope_t, Scope>,
                  "matmul2d: this cooperative tensor was made for another operand, or for another scope");
    static_assert(Y::rows == Rows && Y::columns == Columns,
                  "matmul2d: this cooperative tensor was made by an operation of another size");
  }

  template <class S, class T>
  MSL_LARGE_FUNC static void copy(const S& source, T& result, const char* asks, const char* file, unsigned line) {
    if (!source.places->copies)
      msl_tensor_wrong(file, line,
                       "the destination and the operand have different layouts here\n"
                       "call %s first, and copy through threadgroup memory if it returns false",
                       asks);
    for (unsigned i = 0; i < result.places->capacity; i++) result.elements[i] = source.elements[i];
    *source.places->asked = 1;
    result.is_placed = true;
  }

  // The inner extent K of the product, from an operand in memory. For a cooperative operand, the descriptor has K.
  template <class T>
  MSL_FUNC static int inner(const T& operand, int axis) {
    if constexpr (is_shared<T>) return k;
    else return int(operand.counts.extent(axis));
  }

  template <class L, class R, class D, class N>
  MSL_FUNC static void multiply(const msl_met& met, const msl_brought<L, R, D>& mine, const char* file, unsigned line) {
    typedef msl_brought<L, R, D> brought;
    int depth = Descriptor.msl_has_inner() ? k : inner(*mine.left, Descriptor.transpose_left ? 1 : 0);
    if (!Descriptor.msl_has_inner() && inner(*mine.right, Descriptor.transpose_right ? 0 : 1) != depth)
      msl_tensor_wrong(file, line,
                       "the left operand has an inner extent of %d, and the right operand of %d\n"
                       "expected the same: correct the slices or the transposition",
                       depth, inner(*mine.right, Descriptor.transpose_right ? 0 : 1));
    bool rounds = Descriptor.relaxed_precision && msl_rounds(), adds = Descriptor.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    msl_spread_out<N> a{(N*)msl_room(0, sizeof(N) * m * (depth + 1)), depth, 1};
    msl_spread_out<N> b{(N*)msl_room(1, sizeof(N) * n * (depth + 1)), n, 1};
    msl_spread_out<N> c{(N*)msl_room(2, sizeof(N) * m * n), n, 1};
    __builtin_memset(c.at, 0, sizeof(N) * m * n);
    msl_matrix left{Descriptor.transpose_left ? depth : m, Descriptor.transpose_left ? m : depth, "the left operand", file, line, rounds};
    msl_matrix right{Descriptor.transpose_right ? n : depth, Descriptor.transpose_right ? depth : n, "the right operand", file, line, rounds};
    msl_matrix result{m, n, "the destination", file, line, false};
    collect(met, *mine.left, [](const void* of) MSL_LAMBDA { return ((const brought*)of)->left; }, left,
            Descriptor.transpose_left ? msl_spread_out<N>{a.at, 1, depth} : a, Descriptor.transpose_left, !Descriptor.transpose_left);
    collect(met, *mine.right, [](const void* of) MSL_LAMBDA { return ((const brought*)of)->right; }, right,
            Descriptor.transpose_right ? msl_spread_out<N>{b.at, 1, n} : b, !Descriptor.transpose_right, Descriptor.transpose_right);
    auto of_destination = [](const void* of) MSL_LAMBDA { return ((const brought*)of)->destination; };
    if constexpr (is_shared<D>) {
      if (adds) msl_collect_shares(met, of_destination, result, c, false);
    } else {
      msl_check_same(met, of_destination, result);
      msl_check_extents<__remove_cv(D)>(result, false, false);
      if (adds) msl_collect(*mine.destination, result, c);
    }
    if constexpr (is_same_v<N, int>) msl_multiply_ints(a.at, b.at, c.at, m, n, depth);
    else msl_multiply_floats(a.at, b.at, c.at, m, n, depth);
    if constexpr (is_shared<D>) msl_deliver_shares(met, of_destination, c);
    else msl_deliver(*mine.destination, result, c);
  }

  template <class N, class T, class G>
  MSL_FUNC static void collect(const msl_met& met, const T& operand, G get, const msl_matrix& matrix,
                               msl_spread_out<N> to, bool whole_rows, bool whole_columns) {
    if constexpr (is_shared<T>) msl_collect_shares(met, get, matrix, to, true);
    else {
      msl_check_same(met, get, matrix);
      msl_check_extents<T>(matrix, whole_rows && Descriptor.msl_has_inner(), whole_columns && Descriptor.msl_has_inner());
      msl_collect(operand, matrix, to);
    }
  }
};

// ---- reductions of a destination over its rows or columns ----

template <class E>
MSL_FUNC E msl_reduce(reduction_operation op, E a, E b) {
  return op == reduction_operation::sum ? E(a + b) : op == reduction_operation::max ? metal::max(a, b) : metal::min(a, b);
}

template <bool OfRows, class S, class T>
MSL_LARGE_FUNC void msl_reduce_all(const msl_met& met, reduction_operation op, typename S::element_type identity) {
  typedef typename S::element_type E;
  typedef msl_brought<S, S, T> brought;
  constexpr int rows = S::layout::rows, columns = S::layout::columns, count = OfRows ? rows : columns;
  E* values = (E*)msl_room(0, sizeof(E) * rows * columns);
  E* results = (E*)msl_room(1, sizeof(E) * count);
  for (unsigned t = 0; t < met.threads; t++) {
    const S* source = ((const brought*)met.brought[t])->left;
    for (unsigned i = 0; i < source->places->capacity; i++)
      if (msl_at at = source->mine[i]; at.row >= 0) values[at.row * columns + at.column] = source->elements[i];
  }
  for (int r = 0; r < count; r++) {
    results[r] = identity;
    for (int i = 0; i < (OfRows ? columns : rows); i++)
      results[r] = msl_reduce(op, results[r], OfRows ? values[r * columns + i] : values[i * columns + r]);
  }
  for (unsigned t = 0; t < met.threads; t++) {
    T* to = ((const brought*)met.brought[t])->destination;
    to->is_placed = true;
    for (unsigned i = 0; i < to->places->capacity; i++)
      if (msl_at at = to->mine[i]; at.row >= 0) to->elements[i] = results[OfRows ? at.row : at.column];
  }
}
#define MSL_REDUCE(NAME, OPERAND, OF_ROWS)                                                                           \
  template <class E, class X, class Y, class L, class M>                                                             \
  MSL_FUNC void NAME(cooperative_tensor<E, X, L>& source, cooperative_tensor<E, Y, M>& destination,                  \
                     reduction_operation op = reduction_operation::sum,                                              \
                     E identity = reduction_operation_identity<E>::sum_identity, MSL_HERE) {                         \
    typedef cooperative_tensor<E, X, L> S;                                                                           \
    typedef cooperative_tensor<E, Y, M> T;                                                                           \
    static_assert(L::operand == MSL_DESTINATION && M::operand == OPERAND && L::rows == M::rows &&                    \
                      L::columns == M::columns,                                                                      \
                  #NAME ": expected a destination, and the reduction's destination of the same operation");          \
    msl_brought<S, S, T> mine{&source, &source, &destination};                                                       \
    msl_met met;                                                                                                     \
    msl_meet(L::simdgroups, &mine, #NAME, file, line, &met);                                                         \
    if (met.first) msl_reduce_all<OF_ROWS, S, T>(met, op, identity);                                                 \
  }
MSL_REDUCE(reduce_rows, MSL_ROW_RESULTS, true)
MSL_REDUCE(reduce_columns, MSL_COLUMN_RESULTS, false)
#undef MSL_REDUCE

template <class S, class D, class X, class Y, class L, class M>
MSL_FUNC bool is_iterator_compatible(const cooperative_tensor<S, X, L>&, const cooperative_tensor<D, Y, M>& destination) {
  return !M::is_result || destination.places->follows;
}

}  // namespace tensor_ops
}  // namespace mpp
