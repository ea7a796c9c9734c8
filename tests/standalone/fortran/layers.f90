! The layers of a small network, each with its parameters, their gradients, what it remembers for the way back, and its
! optimizer with the states of its parameters.
module layers
  use, intrinsic :: iso_c_binding, only: real32 => c_float, c_int8_t, c_int64_t
  use rulec_float32, only: rulec_optimizer
  implicit none
  private
  public :: layer, conv2d, conv1d, locally_connected1d, dense

  ! What all layers have: an optimizer of their own, chosen at run time, and its states.
  type, abstract :: layer
    class(rulec_optimizer), allocatable :: optimizer
    integer(c_int8_t), allocatable :: state(:), bias_state(:)
  contains
    procedure(begin), deferred :: begin
    procedure(change), deferred :: update
    procedure :: check_steps
  end type

  abstract interface
    ! Gives the layer a copy of an optimizer, and begins the states.
    subroutine begin(self, optimizer)
      import :: layer, rulec_optimizer
      class(layer), intent(inout) :: self
      class(rulec_optimizer), intent(in) :: optimizer
    end subroutine
    ! Updates the parameters where they lie.
    subroutine change(self)
      import :: layer
      class(layer), intent(inout) :: self
    end subroutine
  end interface

  ! Convolution of images (height, width, channels) without padding, then max(0, .).
  type, extends(layer) :: conv2d
    real(real32), allocatable :: kernel(:, :, :, :), bias(:), kernel_gradient(:, :, :, :), bias_gradient(:)
    real(real32), allocatable :: input(:, :, :), output(:, :, :)
  contains
    procedure :: make => make_conv2d
    procedure :: begin => begin_conv2d
    procedure :: update => update_conv2d
    procedure :: forward => forward_conv2d
    procedure :: backward => backward_conv2d
  end type

  ! Convolution of sequences (length, channels) without padding, then max(0, .).
  type, extends(layer) :: conv1d
    real(real32), allocatable :: kernel(:, :, :), bias(:), kernel_gradient(:, :, :), bias_gradient(:)
    real(real32), allocatable :: input(:, :), output(:, :)
  contains
    procedure :: make => make_conv1d
    procedure :: begin => begin_conv1d
    procedure :: update => update_conv1d
    procedure :: forward => forward_conv1d
    procedure :: backward => backward_conv1d
  end type

  ! The same with a kernel of its own at each place.
  type, extends(layer) :: locally_connected1d
    real(real32), allocatable :: kernel(:, :, :, :), bias(:, :), kernel_gradient(:, :, :, :), bias_gradient(:, :)
    real(real32), allocatable :: input(:, :), output(:, :)
  contains
    procedure :: make => make_local
    procedure :: begin => begin_local
    procedure :: update => update_local
    procedure :: forward => forward_local
    procedure :: backward => backward_local
  end type

  ! A matrix and a bias, nothing after them.
  type, extends(layer) :: dense
    real(real32), allocatable :: weight(:, :), bias(:), weight_gradient(:, :), bias_gradient(:)
    real(real32), allocatable :: input(:)
  contains
    procedure :: make => make_dense
    procedure :: begin => begin_dense
    procedure :: update => update_dense
    procedure :: forward => forward_dense
    procedure :: backward => backward_dense
  end type

contains

  subroutine check_steps(self, steps)
    class(layer), intent(in) :: self
    integer, intent(in) :: steps
    if (self%optimizer%steps(self%state) /= steps) error stop 'the steps of weights were not counted'
    if (self%optimizer%steps(self%bias_state) /= int(steps, c_int64_t)) error stop 'the steps of biases were not counted'
  end subroutine

  subroutine make_conv2d(self, size, channels, filters)
    class(conv2d), intent(inout) :: self
    integer, intent(in) :: size, channels, filters
    allocate(self%kernel(size, size, channels, filters), self%kernel_gradient(size, size, channels, filters))
    allocate(self%bias(filters), self%bias_gradient(filters))
  end subroutine

  subroutine begin_conv2d(self, optimizer)
    class(conv2d), intent(inout) :: self
    class(rulec_optimizer), intent(in) :: optimizer
    allocate(self%optimizer, source=optimizer)
    call self%optimizer%init(self%kernel, self%state)
    call self%optimizer%init(self%bias, self%bias_state)
  end subroutine

  subroutine update_conv2d(self)
    class(conv2d), intent(inout) :: self
    call self%optimizer%update(self%kernel, self%kernel_gradient, self%state)
    call self%optimizer%update(self%bias, self%bias_gradient, self%bias_state)
  end subroutine

  subroutine forward_conv2d(self, input)
    class(conv2d), intent(inout) :: self
    real(real32), intent(in) :: input(:, :, :)
    integer :: i, j, f, k, height, width
    k = size(self%kernel, 1)
    height = size(input, 1) - k + 1
    width = size(input, 2) - k + 1
    self%input = input
    if (.not. allocated(self%output)) allocate(self%output(height, width, size(self%bias)))
    do f = 1, size(self%bias)
      do j = 1, width
        do i = 1, height
          self%output(i, j, f) = &
            max(0.0, self%bias(f) + sum(self%kernel(:, :, :, f)*input(i:i + k - 1, j:j + k - 1, :)))
        end do
      end do
    end do
  end subroutine

  ! Adds to the gradients; an image has nothing before it.
  subroutine backward_conv2d(self, gradient)
    class(conv2d), intent(inout) :: self
    real(real32), intent(in) :: gradient(:, :, :)
    integer :: i, j, f, k
    k = size(self%kernel, 1)
    do f = 1, size(self%bias)
      do j = 1, size(gradient, 2)
        do i = 1, size(gradient, 1)
          if (self%output(i, j, f) > 0.0) then
            self%bias_gradient(f) = self%bias_gradient(f) + gradient(i, j, f)
            self%kernel_gradient(:, :, :, f) = self%kernel_gradient(:, :, :, f) &
              + gradient(i, j, f)*self%input(i:i + k - 1, j:j + k - 1, :)
          end if
        end do
      end do
    end do
  end subroutine

  subroutine make_conv1d(self, size, channels, filters)
    class(conv1d), intent(inout) :: self
    integer, intent(in) :: size, channels, filters
    allocate(self%kernel(size, channels, filters), self%kernel_gradient(size, channels, filters))
    allocate(self%bias(filters), self%bias_gradient(filters))
  end subroutine

  subroutine begin_conv1d(self, optimizer)
    class(conv1d), intent(inout) :: self
    class(rulec_optimizer), intent(in) :: optimizer
    allocate(self%optimizer, source=optimizer)
    call self%optimizer%init(self%kernel, self%state)
    call self%optimizer%init(self%bias, self%bias_state)
  end subroutine

  subroutine update_conv1d(self)
    class(conv1d), intent(inout) :: self
    call self%optimizer%update(self%kernel, self%kernel_gradient, self%state)
    call self%optimizer%update(self%bias, self%bias_gradient, self%bias_state)
  end subroutine

  subroutine forward_conv1d(self, input)
    class(conv1d), intent(inout) :: self
    real(real32), intent(in) :: input(:, :)
    integer :: i, f, k, length
    k = size(self%kernel, 1)
    length = size(input, 1) - k + 1
    self%input = input
    if (.not. allocated(self%output)) allocate(self%output(length, size(self%bias)))
    do f = 1, size(self%bias)
      do i = 1, length
        self%output(i, f) = max(0.0, self%bias(f) + sum(self%kernel(:, :, f)*input(i:i + k - 1, :)))
      end do
    end do
  end subroutine

  ! Adds to the gradients; gives that of the input.
  function backward_conv1d(self, gradient) result(before)
    class(conv1d), intent(inout) :: self
    real(real32), intent(in) :: gradient(:, :)
    real(real32), allocatable :: before(:, :)
    integer :: i, f, k
    k = size(self%kernel, 1)
    allocate(before(size(self%input, 1), size(self%input, 2)))
    before = 0.0
    do f = 1, size(self%bias)
      do i = 1, size(gradient, 1)
        if (self%output(i, f) > 0.0) then
          self%bias_gradient(f) = self%bias_gradient(f) + gradient(i, f)
          self%kernel_gradient(:, :, f) = self%kernel_gradient(:, :, f) + gradient(i, f)*self%input(i:i + k - 1, :)
          before(i:i + k - 1, :) = before(i:i + k - 1, :) + gradient(i, f)*self%kernel(:, :, f)
        end if
      end do
    end do
  end function

  subroutine make_local(self, size, channels, filters, length)
    class(locally_connected1d), intent(inout) :: self
    integer, intent(in) :: size, channels, filters, length
    allocate(self%kernel(size, channels, filters, length), self%kernel_gradient(size, channels, filters, length))
    allocate(self%bias(filters, length), self%bias_gradient(filters, length), self%output(length, filters))
  end subroutine

  subroutine begin_local(self, optimizer)
    class(locally_connected1d), intent(inout) :: self
    class(rulec_optimizer), intent(in) :: optimizer
    allocate(self%optimizer, source=optimizer)
    call self%optimizer%init(self%kernel, self%state)
    call self%optimizer%init(self%bias, self%bias_state)
  end subroutine

  subroutine update_local(self)
    class(locally_connected1d), intent(inout) :: self
    call self%optimizer%update(self%kernel, self%kernel_gradient, self%state)
    call self%optimizer%update(self%bias, self%bias_gradient, self%bias_state)
  end subroutine

  subroutine forward_local(self, input)
    class(locally_connected1d), intent(inout) :: self
    real(real32), intent(in) :: input(:, :)
    integer :: i, f, k
    k = size(self%kernel, 1)
    self%input = input
    do f = 1, size(self%bias, 1)
      do i = 1, size(self%bias, 2)
        self%output(i, f) = max(0.0, self%bias(f, i) + sum(self%kernel(:, :, f, i)*input(i:i + k - 1, :)))
      end do
    end do
  end subroutine

  ! Adds to the gradients; gives that of the input.
  function backward_local(self, gradient) result(before)
    class(locally_connected1d), intent(inout) :: self
    real(real32), intent(in) :: gradient(:, :)
    real(real32), allocatable :: before(:, :)
    integer :: i, f, k
    k = size(self%kernel, 1)
    allocate(before(size(self%input, 1), size(self%input, 2)))
    before = 0.0
    do f = 1, size(self%bias, 1)
      do i = 1, size(self%bias, 2)
        if (self%output(i, f) > 0.0) then
          self%bias_gradient(f, i) = self%bias_gradient(f, i) + gradient(i, f)
          self%kernel_gradient(:, :, f, i) = self%kernel_gradient(:, :, f, i) &
            + gradient(i, f)*self%input(i:i + k - 1, :)
          before(i:i + k - 1, :) = before(i:i + k - 1, :) + gradient(i, f)*self%kernel(:, :, f, i)
        end if
      end do
    end do
  end function

  subroutine make_dense(self, inputs, outputs)
    class(dense), intent(inout) :: self
    integer, intent(in) :: inputs, outputs
    allocate(self%weight(inputs, outputs), self%weight_gradient(inputs, outputs))
    allocate(self%bias(outputs), self%bias_gradient(outputs))
  end subroutine

  subroutine begin_dense(self, optimizer)
    class(dense), intent(inout) :: self
    class(rulec_optimizer), intent(in) :: optimizer
    allocate(self%optimizer, source=optimizer)
    call self%optimizer%init(self%weight, self%state)
    call self%optimizer%init(self%bias, self%bias_state)
  end subroutine

  subroutine update_dense(self)
    class(dense), intent(inout) :: self
    call self%optimizer%update(self%weight, self%weight_gradient, self%state)
    call self%optimizer%update(self%bias, self%bias_gradient, self%bias_state)
  end subroutine

  function forward_dense(self, input) result(output)
    class(dense), intent(inout) :: self
    real(real32), intent(in) :: input(:)
    real(real32), allocatable :: output(:)
    self%input = input
    output = self%bias + matmul(input, self%weight)
  end function

  ! Adds to the gradients; gives that of the input.
  function backward_dense(self, gradient) result(before)
    class(dense), intent(inout) :: self
    real(real32), intent(in) :: gradient(:)
    real(real32), allocatable :: before(:)
    integer :: j
    self%bias_gradient = self%bias_gradient + gradient
    do j = 1, size(gradient)
      self%weight_gradient(:, j) = self%weight_gradient(:, j) + gradient(j)*self%input
    end do
    before = matmul(self%weight, gradient)
  end function
end module layers
