// <metal_cooperative_tensor>: a matrix whose elements are distributed over the threads of a scope (a thread, or several
// SIMD-groups); see runtime/tensors.c.
#pragma once

namespace metal {

// The value that marks unwritten elements; it is unlikely that a kernel writes it.
template <class T>
MSL_FUNC T msl_never_written() {
  if constexpr (sizeof(T) == 1) return __builtin_bit_cast(T, uchar(0xA5));
  else if constexpr (sizeof(T) == 2) return __builtin_bit_cast(T, ushort(0xFFFF));
  else if constexpr (is_floating_point_v<T>) return __builtin_bit_cast(T, 0xFFFFFFFFu);
  else return T(0xA5C3F00D);
}
template <class T>
MSL_FUNC bool msl_is_never_written(T value) {
  if constexpr (sizeof(T) == 1) return false;
  T never = msl_never_written<T>();
  return __builtin_memcmp(&value, &never, sizeof(T)) == 0;
}

// The layout type of a cooperative tensor: for which `matmul2d` operation the tensor was made, and as which operand.
template <int Operand, int Rows, int Columns, class Scope, class Left, class Right>
struct msl_share {
  typedef Scope scope_t;
  typedef Left left_type;
  typedef Right right_type;
  static constexpr int operand = Operand, rows = Rows, columns = Columns;
  static constexpr unsigned simdgroups = Scope::msl_simdgroups, shared = simdgroups ? simdgroups : 1;
  static constexpr int squares = (Rows + 15) / 16 * ((Columns + 15) / 16);
  static constexpr int most = simdgroups ? int((squares + shared - 1) / shared) * 8 + 4 : Rows * Columns;
  static constexpr bool is_result = Operand == MSL_ROW_RESULTS || Operand == MSL_COLUMN_RESULTS;
};

template <class T, bool Const>
struct msl_element_iterator;

template <class E, class X, class L>
class cooperative_tensor {
 public:
  typedef E element_type;
  typedef E value_type;
  typedef X extents_type;
  typedef L layout;
  typedef L layout_type;
  typedef typename X::index_type index_type;
  typedef ushort thread_index_type;
  typedef ushort thread_size_type;
  typedef size_t rank_type;
  typedef thread E& reference;
  typedef const thread E& const_reference;
  typedef msl_element_iterator<cooperative_tensor, false> iterator;
  typedef msl_element_iterator<cooperative_tensor, true> const_iterator;

  E elements[L::most];
  const msl_layout* places;
  const msl_at* mine;
  bool is_placed = false;  // whether the elements were set by an operation that uses their indices

  MSL_LARGE_FUNC cooperative_tensor() {
    for (int i = 0; i < L::most; i++) elements[i] = msl_never_written<E>();
    places = msl_layout_of(L::operand, L::rows, L::columns, L::simdgroups);
    mine = places->at + msl_place_in_scope(L::simdgroups) * places->capacity;
  }

  static constexpr size_t get_rank() { return X::rank(); }
  MSL_FUNC thread_size_type get_capacity() const { return thread_size_type(places->capacity); }
  MSL_FUNC thread_size_type num_elements() const { return thread_size_type(places->capacity); }

  template <class I>
  MSL_FUNC unsigned inside(I i) const {
    if (i < 0 || unsigned(i) >= places->capacity) msl_beyond_capacity(long(i), places->capacity);
    return unsigned(i);
  }
  MSL_FUNC bool is_valid_element(thread_index_type i) const { return mine[inside(i)].row >= 0; }
  MSL_FUNC bool is_valid_element(const_iterator at) const;
  MSL_FUNC array<index_type, X::rank()> get_multidimensional_index(thread_index_type i) const {
    *places->asked = 1;
    msl_at at = mine[inside(i)];
    if constexpr (L::operand == MSL_ROW_RESULTS) return {{index_type(at.row)}};
    else if constexpr (L::operand == MSL_COLUMN_RESULTS) return {{index_type(at.column)}};
    else return {{index_type(at.column), index_type(at.row)}};
  }
  MSL_FUNC array<index_type, X::rank()> get_multidimensional_index(const_iterator at) const;

  template <class I>
  MSL_FUNC reference operator[](I i) {
    return elements[inside(i)];
  }
  template <class I>
  MSL_FUNC const_reference operator[](I i) const {
    return elements[inside(i)];
  }
  MSL_FUNC E get(thread_index_type i) const { return is_valid_element(i) ? elements[i] : E(0); }
  MSL_FUNC void set(thread_index_type i, E value) {
    if (is_valid_element(i)) elements[i] = value;
  }

  // Load from or store to a tensor in memory. Elements beyond the tensor's extents are loaded as 0 and are not stored.
  template <class T>
  MSL_FUNC void load(const T& from, MSL_HERE) {
    static_assert(is_same_v<E, typename T::value_type>, "load: expected a tensor of the same type of elements");
    is_placed = true;
    for (unsigned i = 0; i < places->capacity; i++)
      if (mine[i].row >= 0) elements[i] = msl_within(from, mine[i], file, line) ? msl_of(from, mine[i]) : E(0);
  }
  template <class T>
  MSL_FUNC void store(const T& to, MSL_HERE) const {
    static_assert(is_same_v<E, typename T::value_type>, "store: expected a tensor of the same type of elements");
    *places->asked = 1;
    for (unsigned i = 0; i < places->capacity; i++)
      if (mine[i].row >= 0 && !is_copy(mine[i]) && msl_within(to, mine[i], file, line)) msl_of(to, mine[i]) = elements[i];
  }
  // Whether an element of a reduction's results is a copy: several threads may have the result of one row.
  MSL_FUNC bool is_copy(msl_at at) const {
    return (L::operand == MSL_ROW_RESULTS && at.column) || (L::operand == MSL_COLUMN_RESULTS && at.row);
  }
  // Whether the tensor in memory has the element. An element inside a slice's static extents but past the edge of the
  // whole tensor is a mistake.
  template <class T>
  MSL_FUNC static bool msl_within(const T& memory, msl_at at, const char* file, unsigned line) {
    static_assert(T::msl_rank == X::rank(), "expected a tensor of as many axes");
    if constexpr (T::msl_rank == 1) {
      const long index[1] = {L::operand == MSL_COLUMN_RESULTS ? at.column : at.row};
      return msl_inside(memory, index, file, line);
    } else {
      const long index[2] = {at.column, at.row};
      return msl_inside(memory, index, file, line);
    }
  }
  template <class T>
  MSL_FUNC static decltype(auto) msl_of(const T& memory, msl_at at) {
    if constexpr (T::msl_rank == 1) {
      const long index[1] = {L::operand == MSL_COLUMN_RESULTS ? at.column : at.row};
      return memory.element(index);
    } else {
      const long index[2] = {at.column, at.row};
      return memory.element(index);
    }
  }

  MSL_FUNC iterator get_iterator(thread_index_type i) { return {this, i}; }
  MSL_FUNC iterator begin() { return {this, 0}; }
  MSL_FUNC iterator end() { return {this, get_capacity()}; }
  MSL_FUNC const_iterator begin() const { return {this, 0}; }
  MSL_FUNC const_iterator end() const { return {this, get_capacity()}; }
  // `other` is an iterator at an element of another cooperative tensor. Return an iterator at the corresponding element
  // of this tensor: if this tensor has the results of rows, at the result of the row of `other`'s element.
  template <class Other>
  MSL_FUNC iterator map_iterator(Other other) {
    return {this, mapped(other)};
  }
  template <class Other>
  MSL_FUNC const_iterator map_iterator(Other other) const {
    return {this, mapped(other)};
  }
  template <class Other>
  MSL_FUNC unsigned mapped(Other other) const {
    *places->asked = *other.of->places->asked = 1;
    msl_at at = other.of->mine[other.of->inside(other.i)];
    if (at.row < 0) return other.i < places->capacity ? other.i : 0;
    for (unsigned i = 0; i < places->capacity; i++) {
      msl_at here = mine[i];
      if (here.row < 0) continue;
      bool same_row = L::operand == MSL_COLUMN_RESULTS || here.row == at.row;
      if (same_row && (L::operand == MSL_ROW_RESULTS || here.column == at.column)) return i;
    }
    msl_not_mapped();
  }
};

template <class T, bool Const>
struct msl_element_iterator {
  conditional_t<Const, const T*, T*> of;
  unsigned i;
  typedef conditional_t<Const, const typename T::element_type&, typename T::element_type&> reference;
  MSL_FUNC operator msl_element_iterator<T, true>() const
    requires(!Const)
  {
    return {of, i};
  }
  MSL_FUNC reference operator*() const { return (*of)[i]; }
  MSL_FUNC msl_element_iterator& operator++() {
    i++;
    return *this;
  }
  MSL_FUNC msl_element_iterator operator++(int) {
    msl_element_iterator before = *this;
    i++;
    return before;
  }
  MSL_FUNC bool operator==(const msl_element_iterator& other) const { return i == other.i; }
  MSL_FUNC bool is_valid_element() const { return of->is_valid_element(ushort(i)); }
  MSL_FUNC auto get_multidimensional_index() const { return of->get_multidimensional_index(ushort(i)); }
};
template <class E, class X, class L>
MSL_FUNC bool cooperative_tensor<E, X, L>::is_valid_element(const_iterator at) const {
  return is_valid_element(ushort(at.i));
}
template <class E, class X, class L>
MSL_FUNC array<typename X::index_type, X::rank()> cooperative_tensor<E, X, L>::get_multidimensional_index(
    const_iterator at) const {
  return get_multidimensional_index(ushort(at.i));
}

template <class T>
inline constexpr bool is_cooperative_tensor_v = false;
template <class E, class X, class L>
inline constexpr bool is_cooperative_tensor_v<cooperative_tensor<E, X, L>> = true;

// Whether a tensor in memory has the element. Operations skip elements that do not exist.
template <class T>
MSL_FUNC bool msl_inside(const T& memory, const long (&at)[T::msl_rank], const char* file, unsigned line) {
  for (size_t axis = 0; axis < T::msl_rank; axis++)
    if (at[axis] >= memory.counts.extent(axis)) return false;
  int axis = memory.outside(at);
  if (axis >= 0)
    msl_tensor_wrong(file, line,
                     "axis %d of a slice ends at %ld, and its tensor has %ld elements along it\n"
                     "a slice with static extents is not checked on a GPU: guard it, or slice without extents",
                     axis, memory.origin[axis] + long(memory.counts.extent(axis)), memory.edge[axis]);
  return true;
}

}  // namespace metal
