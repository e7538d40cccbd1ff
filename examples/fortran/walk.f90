! Random walkers in Fortran: saves every 50 steps, and continues exactly where it was killed. See README.md.
!
! nebula_f binds those calls of nebula.h that this program needs; options and sessions stay opaque to Fortran in nebula_c.c.
module nebula_f
  use, intrinsic :: iso_c_binding
  implicit none
  interface
    ! 0, or the status of nebula.h. Strings end with c_null_char.
    integer(c_int) function walk_open(path) bind(c)
      import :: c_char, c_int
      character(kind=c_char), intent(in) :: path(*)
    end function
    ! 0: the state is that of the newest checkpoint; 20: there is none.
    integer(c_int) function walk_resume(at, count, random, step) bind(c)
      import :: c_int, c_int64_t
      integer(c_int64_t), value :: count
      integer(c_int64_t), intent(inout) :: at(*), random, step
    end function
    integer(c_int) function walk_save(at, count, random, step) bind(c)
      import :: c_int, c_int64_t
      integer(c_int64_t), value :: count
      integer(c_int64_t), intent(in) :: at(*), random, step
    end function
    integer(c_int) function walk_close() bind(c)
      import :: c_int
    end function
    integer(c_int) function raise(signal) bind(c, name='raise')
      import :: c_int
      integer(c_int), value :: signal
    end function
  end interface
end module

program walk
  use nebula_f
  implicit none
  integer(c_int64_t), parameter :: count = 1000, save_every = 50, last = 400
  integer(c_int64_t) :: at(count), random, step, crash_at, index, total
  integer(c_int) :: status
  character(len=1000) :: path, text

  if (command_argument_count() < 1) stop 2
  call get_command_argument(1, path)
  crash_at = 0
  if (command_argument_count() > 1) then
    call get_command_argument(2, text)
    read (text, *) crash_at
  end if
  at = 0
  random = 1
  step = 0
  if (walk_open(trim(path) // c_null_char) /= 0) stop 1
  status = walk_resume(at, count, random, step)
  if (status == 0) then
    print '(a, i0)', 'resuming from step ', step
  else if (status == 20) then
    print '(a, i0)', 'starting from step ', step
  else
    stop 1
  end if
  do while (step < last)
    do index = 1, count
      random = ieor(random, ishft(random, 13))
      random = ieor(random, ishft(random, -7))
      random = ieor(random, ishft(random, 17))
      at(index) = at(index) + merge(1_c_int64_t, -1_c_int64_t, random < 0)
    end do
    step = step + 1
    if (step == crash_at) status = raise(9_c_int)
    if (mod(step, save_every) == 0) then
      if (walk_save(at, count, random, step) /= 0) stop 1
    end if
  end do
  if (walk_close() /= 0) stop 1
  total = 0
  do index = 1, count
    total = total + index * at(index)
  end do
  print '(a, i0, a, i0)', 'step ', step, ' checksum ', total
end program
