! Trains on handwritten digits with a rule that rulec wrote as C, chosen by its name: `train adamw 0.004`. Every layer has
! its parameters, its optimizer and its states, and every array is updated where it lies.
program train
  use, intrinsic :: iso_c_binding
  use rulec_float32, only: rulec_optimizer
  use adamw_rule, only: adamw_optimizer
  use lion_rule, only: lion_optimizer
  use layers
  implicit none

  ! One array of parameters, whatever its rank: pointers to it and to its gradient.
  type :: trained
    real(c_float), pointer, contiguous :: values(:), gradient(:)
  end type

  type :: any_layer
    class(layer), pointer :: is
  end type

  interface
    ! The arrays that the C routines must be given, and how often they were given others: see recorder.c.
    subroutine expect_step(param, grad) bind(c)
      import :: c_ptr
      type(c_ptr), value :: param, grad
    end subroutine
    function wrong_steps() bind(c) result(count)
      import :: c_int
      integer(c_int) :: count
    end function
  end interface

  type(conv2d), target :: images_in
  type(conv1d), target :: along
  type(locally_connected1d), target :: local
  type(dense), target :: classes
  type(trained), target :: parameters(8)
  type(any_layer) :: network(4)
  class(rulec_optimizer), allocatable :: optimizer
  integer :: samples, tests, epochs, batch, epoch, first, i
  real(c_float), allocatable :: images(:, :), test_images(:, :)
  integer(c_int32_t), allocatable :: labels(:), test_labels(:), order(:, :)
  real(c_float) :: loss

  call read_data()
  call make_network()
  call choose()
  do i = 1, size(network)
    call network(i)%is%begin(optimizer)
  end do
  call check_places()
  open(10, file='losses.txt')
  do epoch = 1, epochs
    loss = 0.0
    do first = 1, size(order, 1) - batch + 1, batch
      loss = loss + gradients(order(first:first + batch - 1, epoch))
      if (epoch == 1 .and. first == 1) call write_all('first_gradients.bin', .true.)
      do i = 1, size(network)
        call network(i)%is%update()
      end do
      if (epoch == 1 .and. first == 1) call write_all('first_parameters.bin', .false.)
    end do
    write(10, *) loss/real(size(order, 1)/batch)
  end do
  close(10)
  call write_all('parameters.bin', .false.)
  call check_places()
  if (wrong_steps() /= 0) error stop 'a C routine was given a copy, or not all arrays'
  do i = 1, size(network)
    call network(i)%is%check_steps(epochs*(size(order, 1)/batch))
  end do
  open(10, file='accuracy.txt')
  write(10, *) accuracy()
  close(10)

contains

  subroutine read_data()
    open(10, file='sizes.txt', status='old')
    read(10, *) samples, tests, epochs, batch
    close(10)
    allocate(images(64, samples), labels(samples), test_images(64, tests), test_labels(tests))
    allocate(order(samples, epochs))
    open(10, file='data.bin', access='stream', form='unformatted', status='old')
    read(10) images, labels, test_images, test_labels, order
    close(10)
  end subroutine

  subroutine make_network()
    call images_in%make(3, 1, 8)
    call along%make(3, 8, 8)
    call local%make(3, 8, 4, 32)
    call classes%make(128, 10)
    parameters(1)%values(1:size(images_in%kernel)) => images_in%kernel
    parameters(1)%gradient(1:size(images_in%kernel)) => images_in%kernel_gradient
    parameters(2)%values => images_in%bias
    parameters(2)%gradient => images_in%bias_gradient
    parameters(3)%values(1:size(along%kernel)) => along%kernel
    parameters(3)%gradient(1:size(along%kernel)) => along%kernel_gradient
    parameters(4)%values => along%bias
    parameters(4)%gradient => along%bias_gradient
    parameters(5)%values(1:size(local%kernel)) => local%kernel
    parameters(5)%gradient(1:size(local%kernel)) => local%kernel_gradient
    parameters(6)%values(1:size(local%bias)) => local%bias
    parameters(6)%gradient(1:size(local%bias)) => local%bias_gradient
    parameters(7)%values(1:size(classes%weight)) => classes%weight
    parameters(7)%gradient(1:size(classes%weight)) => classes%weight_gradient
    parameters(8)%values => classes%bias
    parameters(8)%gradient => classes%bias_gradient
    network(1)%is => images_in
    network(2)%is => along
    network(3)%is => local
    network(4)%is => classes
    do i = 1, size(parameters)
      call expect_step(c_loc(parameters(i)%values), c_loc(parameters(i)%gradient))
    end do
    open(10, file='initial.bin', access='stream', form='unformatted', status='old')
    do i = 1, size(parameters)
      read(10) parameters(i)%values
    end do
    close(10)
  end subroutine

  ! The rule and the learning rate that the command line names.
  subroutine choose()
    character(40) :: word, rate
    real(c_double) :: lr
    call get_command_argument(1, word)
    call get_command_argument(2, rate)
    read(rate, *) lr
    select case (word)
    case ('adamw')
      allocate(adamw_optimizer :: optimizer)
    case ('lion')
      allocate(lion_optimizer :: optimizer)
    case default
      error stop 'no such rule'
    end select
    call optimizer%set('lr', lr)
  end subroutine

  ! The arrays that steps are expected with are where the layers have them.
  subroutine check_places()
    type(c_ptr) :: own(8)
    own = [ &
      c_loc(images_in%kernel), c_loc(images_in%bias), c_loc(along%kernel), c_loc(along%bias), &
      c_loc(local%kernel), c_loc(local%bias), c_loc(classes%weight), c_loc(classes%bias)]
    do i = 1, size(own)
      if (.not. c_associated(own(i), c_loc(parameters(i)%values))) error stop 'a parameter is not where its layer has it'
    end do
  end subroutine

  ! The mean loss of a batch; its gradients are left in the layers.
  function gradients(chosen) result(mean)
    integer(c_int32_t), intent(in) :: chosen(:)
    real(c_float) :: mean, scores(10)
    integer :: k
    do k = 1, size(parameters)
      parameters(k)%gradient = 0.0
    end do
    mean = 0.0
    do k = 1, size(chosen)
      scores = scores_of(images(:, chosen(k)))
      scores = exp(scores - maxval(scores))
      scores = scores/sum(scores)
      mean = mean - log(max(scores(labels(chosen(k))), tiny(1.0_c_float)))/real(size(chosen))
      scores(labels(chosen(k))) = scores(labels(chosen(k))) - 1.0
      call backward(scores/real(size(chosen)))
    end do
  end function

  function scores_of(pixels) result(scores)
    real(c_float), intent(in) :: pixels(64)
    real(c_float) :: scores(10)
    call images_in%forward(reshape(pixels, [8, 8, 1]))
    call along%forward(reshape(images_in%output, [36, 8]))
    call local%forward(along%output)
    scores = classes%forward(reshape(local%output, [128]))
  end function

  subroutine backward(gradient)
    real(c_float), intent(in) :: gradient(10)
    call images_in%backward( &
      reshape(along%backward(local%backward(reshape(classes%backward(gradient), [32, 4]))), [6, 6, 8]))
  end subroutine

  function accuracy() result(share)
    real(c_float) :: share
    integer :: k, right
    right = 0
    do k = 1, tests
      if (maxloc(scores_of(test_images(:, k)), 1) == test_labels(k)) right = right + 1
    end do
    share = real(right)/real(tests)
  end function

  subroutine write_all(file, of_gradients)
    character(*), intent(in) :: file
    logical, intent(in) :: of_gradients
    integer :: k
    open(11, file=file, access='stream', form='unformatted', status='replace')
    do k = 1, size(parameters)
      if (of_gradients) write(11) parameters(k)%gradient
      if (.not. of_gradients) write(11) parameters(k)%values
    end do
    close(11)
  end subroutine
end program train
